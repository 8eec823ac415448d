// The attention map: tokens down, sources across, the largest attention in each cell.

import { Chart, SMALL } from "./chart.js";
import { cividis, isDark } from "./colour.js";
import { el } from "./dom.js";
import { headLabel } from "./arcs.js";
import { binByMax } from "./looking.js";
import { count, linear, percent, positionTicks } from "./numbers.js";

const PAD = { left: 52, right: 10, top: 8, bottom: 34 };

/** Opacity of an attention, so that weak hits recede and strong ones stand out. */
function strength(mass) {
  return Math.min(1, 0.12 + 0.95 * mass ** 0.5);
}

export function makeAttention(parent, store, jump) {
  const { data } = store;
  let cells = null;

  function range() {
    return store.state.zoom ?? [0, data.length];
  }

  function zoomTo(start, stop) {
    start = Math.max(0, Math.floor(start));
    stop = Math.min(data.length, Math.ceil(stop));
    if (stop - start < 4) stop = Math.min(data.length, start + 4);
    store.set({ zoom: start === 0 && stop === data.length ? null : [start, stop] });
  }

  function around(factor) {
    const [start, stop] = range();
    const middle = store.state.token >= start && store.state.token < stop ? store.state.token : (start + stop) / 2;
    const size = (stop - start) * factor;
    zoomTo(middle - ((middle - start) / (stop - start)) * size, middle + ((stop - middle) / (stop - start)) * size);
  }

  const button = (text, title, act) => el("button", { type: "button", title, "aria-label": title, onclick: act }, text);
  const chart = new Chart(parent, {
    id: "attention",
    title: "Attention map",
    height: (width) => Math.min(560, Math.max(260, width * 0.86)),
    controls: [
      button("+", "Zoom in on the chosen token", () => around(0.5)),
      button("−", "Zoom out", () => around(2)),
      button("Whole", "Show the whole trace", () => store.set({ zoom: null })),
    ],
    caption: () => {
      const [start, stop] = range();
      const whose = store.shownHead === null ? `the largest of ${data.heads.length} query heads` : headLabel(store.head);
      return `Each row is a token that attends, each column a position attended to; a cell shows the largest attention within it (${whose}), because a mean would hide revisits. ` +
        `Only hits (the ${data.plain.trace.hits} most attended positions of each head) are known; empty cells have none, which is not zero. ` +
        (store.state.over === "full" ? "Orange: the cache had dropped it. " : "") +
        (data.plain.truth ? "Boxes: where the task says that the next token had to look. " : "") +
        "The dashed line is where distant begins. " +
        (stop - start < data.length ? `Tokens ${count(start)} to ${count(stop - 1)}. ` : "") +
        "Drag to zoom, double-click for the whole.";
    },
    draw(context, { width, height, colours, svg }) {
      const [start, stop] = range();
      const w = width - PAD.left - PAD.right;
      const h = height - PAD.top - PAD.bottom;
      const size = Math.max(1, Math.min(stop - start, Math.floor(Math.min(w, h) / 2)));
      const { most, gone } = binByMax(data, store.hits, store.shownHead, [start, stop], [start, stop], size, size);
      cells = { most, gone, size, start, stop };
      const cw = w / size;
      const ch = h / size;
      context.fillStyle = colours.faint;
      context.beginPath();
      context.moveTo(PAD.left, PAD.top);
      context.lineTo(PAD.left + w, PAD.top + h);
      context.lineTo(PAD.left, PAD.top + h);
      context.closePath();
      context.fill();
      const dark = isDark();
      // Strong is far from the ground: dark on white, bright on black.
      const shade = (share) => cividis(dark ? 0.25 + 0.75 * share : 0.92 - 0.92 * share);
      const colourOf = (cell) => {
        return gone[cell] ? [213, 94, 0] : shade(Math.sqrt(most[cell] / 255));
      };
      if (svg) {
        for (let cell = 0; cell < most.length; cell++) {
          if (!most[cell]) continue;
          context.globalAlpha = strength(most[cell] / 255);
          context.fillStyle = `rgb(${colourOf(cell).join(",")})`;
          context.fillRect(PAD.left + (cell % size) * cw, PAD.top + Math.floor(cell / size) * ch, cw + 0.2, ch + 0.2);
        }
        context.globalAlpha = 1;
      } else {
        const image = new ImageData(size, size);
        for (let cell = 0; cell < most.length; cell++) {
          if (!most[cell]) continue;
          const [red, green, blue] = colourOf(cell);
          image.data.set([red, green, blue, 255 * strength(most[cell] / 255)], cell * 4);
        }
        const picture = el("canvas", { width: size, height: size });
        picture.getContext("2d").putImageData(image, 0, 0);
        context.imageSmoothingEnabled = false;
        context.drawImage(picture, PAD.left, PAD.top, w, h);
      }
      const x = linear([start, stop], [PAD.left, PAD.left + w]);
      const y = linear([start, stop], [PAD.top, PAD.top + h]);
      context.save();
      context.beginPath();
      context.rect(PAD.left, PAD.top, w, h);
      context.clip();
      context.strokeStyle = colours.muted;
      context.lineWidth = 0.75;
      context.setLineDash([2, 3]);
      context.beginPath();
      const window = data.plain.summary.window;
      context.moveTo(x(start - window), y(start));
      context.lineTo(x(stop - window), y(stop));
      context.stroke();
      context.setLineDash([]);
      context.strokeStyle = colours.ink;
      context.lineWidth = 1;
      context.globalAlpha = 0.55;
      const here = store.state.token + 0.5;
      context.beginPath();
      context.moveTo(x(start), y(here));
      context.lineTo(x(Math.min(stop, here)), y(here));
      context.stroke();
      context.globalAlpha = 1;
      for (const { position, sources } of data.plain.truth ?? []) {
        for (const [first, last] of sources) {
          context.strokeStyle = colours.ink;
          context.strokeRect(x(first) - 1, y(position - 1) - 1, Math.max(4, x(last) - x(first)) + 2, Math.max(3, y(1) - y(0)) + 2);
        }
      }
      context.restore();
      context.font = SMALL;
      context.fillStyle = colours.muted;
      context.textBaseline = "top";
      context.textAlign = "center";
      for (const tick of positionTicks(start, stop, 5)) context.fillText(count(tick), x(tick), PAD.top + h + 5);
      context.fillText("position attended to", PAD.left + w / 2, PAD.top + h + 19);
      context.textAlign = "right";
      context.textBaseline = "middle";
      for (const tick of positionTicks(start, stop, 5)) context.fillText(count(tick), PAD.left - 6, y(tick));
      legend(context, PAD.left + w - 150, PAD.top + 14, colours, shade);
    },
    label: () => `Attention map of tokens ${range()[0]} to ${range()[1] - 1}; arrow keys move the chosen token`,
    hover({ x, y, width, height }) {
      const at = cellAt(x, y, width, height);
      if (!at) return null;
      const { step, source, mass, gone, wide } = at;
      if (source > step) return null;
      return [
        `${count(step)}${wide} looks at ${count(source)}${wide}`,
        data.snippet(Math.max(0, source - 3), source + 4, 60),
        mass ? `attention ${percent(mass, 1)}${gone ? ", evicted" : ""}` : "no hit here",
      ];
    },
    click({ x, y, width, height }) {
      const at = cellAt(x, y, width, height);
      if (at) jump(at.step);
    },
    double: () => store.set({ zoom: null }),
    drag(from, to, end) {
      if (!end || Math.hypot(to.x - from.x, to.y - from.y) < 12) return;
      const one = cellAt(from.x, from.y, to.width, to.height);
      const other = cellAt(to.x, to.y, to.width, to.height);
      if (!one || !other) return;
      // The axes stay equal, so that the diagonal stays one: the range spans both sides of the drawn box.
      const all = [one.step, one.source, other.step, other.source];
      zoomTo(Math.min(...all), Math.max(...all) + 1);
    },
    wheel: (at, delta) => around(delta > 0 ? 1.25 : 0.8),
    key(event) {
      if (event.key === "+" || event.key === "=") around(0.5);
      else if (event.key === "-") around(2);
      else if (event.key === "0") store.set({ zoom: null });
      else return false;
      return true;
    },
    table: () => {
      const rows = [];
      for (let cell = 0; cells && cell < cells.most.length; cell++) {
        if (!cells.most[cell]) continue;
        const per = (cells.stop - cells.start) / cells.size;
        rows.push({
          step: Math.floor(cells.start + Math.floor(cell / cells.size) * per),
          source: Math.floor(cells.start + (cell % cells.size) * per),
          mass: cells.most[cell] / 255, evicted: cells.gone[cell] ? "yes" : "no",
        });
      }
      return {
        columns: [{ key: "step", name: "token" }, { key: "source", name: "position" }, { key: "mass", name: "largest attention" }, { key: "evicted", name: "evicted" }],
        rows: rows.sort((a, b) => b.mass - a.mass),
      };
    },
  });

  function legend(context, x, y, colours, shade) {
    for (let index = 0; index < 60; index++) {
      context.globalAlpha = strength((index / 59) ** 2);
      context.fillStyle = `rgb(${shade(index / 59).join(",")})`;
      context.fillRect(x + 40 + index, y, 1.2, 8);
    }
    context.globalAlpha = 1;
    context.fillStyle = colours.muted;
    context.textAlign = "right";
    context.fillText("0 %", x + 34, y + 4);
    context.textAlign = "left";
    context.fillText("100 %", x + 106, y + 4);
  }

  function cellAt(x, y, width, height) {
    if (!cells) return null;
    const w = width - PAD.left - PAD.right;
    const h = height - PAD.top - PAD.bottom;
    const column = Math.floor(((x - PAD.left) / w) * cells.size);
    const row = Math.floor(((y - PAD.top) / h) * cells.size);
    if (column < 0 || row < 0 || column >= cells.size || row >= cells.size) return null;
    const per = (cells.stop - cells.start) / cells.size;
    const cell = row * cells.size + column;
    return {
      step: Math.min(data.length - 1, Math.floor(cells.start + row * per)),
      source: Math.min(data.length - 1, Math.floor(cells.start + column * per)),
      mass: cells.most[cell] / 255, gone: cells.gone[cell],
      wide: per > 1 ? ` (and ${Math.ceil(per) - 1} more)` : "",
    };
  }

  store.listen(["token", "head", "pooled", "over", "zoom"], () => chart.redraw());
  return { chart, around, cells: () => cells };
}
