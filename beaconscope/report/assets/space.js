// The queries of a head on a plane, and its beacons over time.

import { beaconChanges, changeAt, keyOf } from "./beaconing.js";
import { Chart, SMALL } from "./chart.js";
import { apart, css, isDark, OKABE_ITO } from "./colour.js";
import { choices, el, picker } from "./dom.js";
import { PHASES } from "./minimap.js";
import { count, linear } from "./numbers.js";

const TRAIL = 6;

export function makeSpace(parent, store, jump) {
  const { data } = store;
  let space = "pre-rope";
  let colouring = "time";
  let until = data.length - 1;
  let playing = null;
  let known = null;

  const slider = el("input", {
    type: "range", min: "0", max: String(Math.max(0, data.length - 1)), step: "1", "aria-label": "Step",
    oninput: () => {
      stop();
      setUntil(Number(slider.value));
    },
  });
  const play = el("button", { type: "button", class: "play", "aria-label": "Play", title: "Play (space)", onclick: () => toggle() }, "▶");
  const said = el("output", { class: "said" });
  const pickSpace = choices("Query space", [["pre-rope", "Before RoPE"], ["post-rope", "After RoPE"]], space, (value) => {
    space = value;
    refresh();
  });

  const chart = new Chart(parent, {
    id: "space",
    title: "Query space",
    height: (width) => Math.min(520, Math.max(280, width * 0.72)),
    controls: [
      pickSpace,
      el("label", { class: "inline" }, "Colour by ", picker("Colour by", [["time", "time"], ["phase", "phase"], ["beacon", "beacon"], ["trt", "TRT"]], colouring, (value) => {
        colouring = value;
        chart.redraw();
      })),
    ],
    before: [el("div", { class: "player" }, play, slider, said)],
    caption: () => {
      if (!known) return "";
      const { method } = known;
      return `Queries of ${store.head.name}, ${count(known.position.length)} of ${count(data.length)}, on the plane by ${method}${method === "UMAP" ? " (cosine; neighbours mean something, distances and sizes of clusters do not)" : " (the two directions of most variance of the unit queries)"}. ` +
        (known.changes.length ? "Diamonds are the beacons in force at the step, each on the query that it was taken from; a ring is one that just came, a cross one that just left; the line joins the newest query with its nearest beacon. " : "This head has no recorded beacons. ") +
        "Queries after the step are faint.";
    },
    draw(context, { width, height, colours }) {
      context.font = SMALL;
      if (!known) {
        context.fillStyle = colours.muted;
        context.fillText(`There is no rotary embedding to undo in layer ${store.head.layer}; see “After RoPE”.`, 12, 24);
        return;
      }
      const scale = scales(width, height);
      const nearest = data.pack.array(`beacons.${store.state.head}.nearest`);
      const { position } = known;
      const radius = position.length > 1500 ? 2 : 2.6;
      const now = newest();
      const dark = isDark();
      for (let index = 0; index < position.length; index++) {
        const at = position[index];
        const [x, y] = scale(index);
        const trt = data.revisitAt.has(at);
        context.globalAlpha = at > until ? 0.08 : colouring === "trt" && !trt ? 0.25 : 0.75;
        context.fillStyle = colourOf(at, nearest, colours, dark);
        const r = trt && colouring === "trt" && at <= until ? radius + 1.6 : radius;
        if (data.phase[at] === 0) context.fillRect(x - r, y - r, 2 * r, 2 * r);
        else {
          context.beginPath();
          context.arc(x, y, r, 0, 2 * Math.PI);
          context.fill();
        }
      }
      context.globalAlpha = 1;
      drawBeacons(context, scale, colours, nearest, now);
      const chosen = known.at.get(store.state.token);
      if (chosen !== undefined) {
        const [x, y] = scale(chosen);
        context.strokeStyle = colours.ink;
        context.lineWidth = 1.5;
        context.beginPath();
        context.arc(x, y, 8, 0, 2 * Math.PI);
        context.stroke();
      }
      legend(context, height, colours, dark);
    },
    label: () => known ? `Query space of head ${store.head.name} at step ${until}, ${known.position.length} queries, ${beaconsNow().length} beacons` : "No query space",
    hover({ x, y, width, height }) {
      const found = nearestPoint(x, y, width, height);
      if (!found) return null;
      const nearest = data.pack.array(`beacons.${store.state.head}.nearest`);
      const isBeacon = beaconsNow().find((beacon) => beacon.source === found.position);
      return [
        `${count(found.position)} ${data.snippet(Math.max(0, found.position - 3), found.position + 4, 60)}`,
        PHASES[data.phase[found.position]] + (data.revisitAt.has(found.position) ? ", revisit" : ""),
        nearest.length && nearest[found.position] !== 0xffff ? `nearest beacon was ${nearest[found.position]}` : null,
        isBeacon ? `is beacon ${isBeacon.index} at this step` : null,
      ].filter(Boolean);
    },
    click({ x, y, width, height }) {
      const found = nearestPoint(x, y, width, height);
      if (!found) return;
      const beacon = beaconsNow().find((each) => each.source === found.position);
      jump(found.position);
      if (beacon) store.set({ beacon: keyOf(beacon) });
    },
    table: () => ({
      columns: [{ key: "position", name: "position" }, { key: "x", name: "x" }, { key: "y", name: "y" }, { key: "phase", name: "phase" }, { key: "trt", name: "revisit" }, { key: "beacon", name: "nearest beacon" }],
      rows: known ? Array.from(known.position, (position, index) => ({
        position, x: known.x[index], y: known.y[index], phase: PHASES[data.phase[position]],
        trt: data.revisitAt.has(position) ? "yes" : "no", beacon: beaconAt(position),
      })) : [],
    }),
  });

  function beaconAt(position) {
    const nearest = data.pack.array(`beacons.${store.state.head}.nearest`);
    return nearest.length && nearest[position] !== 0xffff ? nearest[position] : null;
  }

  function colourOf(position, nearest, colours, dark) {
    if (colouring === "time") return css(apart(position / Math.max(1, data.length - 1), dark));
    if (colouring === "phase") return [colours.muted, colours.accent, colours.back][data.phase[position]];
    if (colouring === "trt") return data.revisitAt.has(position) ? colours.loss : colours.muted;
    const beacon = nearest.length ? nearest[position] : 0xffff;
    return beacon === 0xffff ? colours.muted : OKABE_ITO[beacon % OKABE_ITO.length];
  }

  function beaconsNow(step = until) {
    const change = changeAt(known.changes, step + 1);
    return change < 0 ? [] : known.changes[change].beacons;
  }

  /** Index into the points of a beacon: the query that it was taken from, or its centroid. */
  function pointOf(beacon) {
    if (beacon.source >= 0) return known.at.get(beacon.source);
    const index = known.position.length + beacon.centroid;
    return index < known.x.length ? index : undefined;
  }

  function newest() {
    let best;
    for (let index = known.position.length - 1; index >= 0; index--) {
      if (known.position[index] <= until) {
        best = index;
        break;
      }
    }
    return best;
  }

  function drawBeacons(context, scale, colours, nearest, now) {
    const number = changeAt(known.changes, until + 1);
    if (number < 0) return;
    const beacons = known.changes[number].beacons;
    const before = number ? known.changes[number - 1].beacons : [];
    const former = new Set(before.map(keyOf));
    const present = new Set(beacons.map(keyOf));
    for (const beacon of before) {
      if (present.has(keyOf(beacon))) continue;
      const point = pointOf(beacon);
      if (point === undefined) continue;
      const [x, y] = scale(point);
      context.strokeStyle = colours.muted;
      context.lineWidth = 1.5;
      context.beginPath();
      context.moveTo(x - 4, y - 4);
      context.lineTo(x + 4, y + 4);
      context.moveTo(x + 4, y - 4);
      context.lineTo(x - 4, y + 4);
      context.stroke();
    }
    for (const beacon of beacons) {
      const point = pointOf(beacon);
      if (point === undefined) continue;
      const [x, y] = scale(point);
      if (beacon.source < 0) trail(context, scale, number, beacon.index, colours);
      const chosen = store.state.beacon === keyOf(beacon);
      const r = chosen ? 8 : 6;
      context.beginPath();
      context.moveTo(x, y - r);
      context.lineTo(x + r, y);
      context.lineTo(x, y + r);
      context.lineTo(x - r, y);
      context.closePath();
      context.fillStyle = colouring === "beacon" ? OKABE_ITO[beacon.index % OKABE_ITO.length] : colours.paper;
      context.fill();
      context.strokeStyle = chosen ? colours.loss : colours.ink;
      context.lineWidth = chosen ? 2.5 : 1.5;
      context.stroke();
      if (number && !former.has(keyOf(beacon))) {
        context.strokeStyle = colours.accent;
        context.lineWidth = 2;
        context.beginPath();
        context.arc(x, y, r + 5, 0, 2 * Math.PI);
        context.stroke();
      }
    }
    if (now === undefined) return;
    const at = known.position[now];
    // What the trace says: the nearest of the beacons that were in force at that query.
    const index = nearest.length ? nearest[at] : 0xffff;
    const inForce = changeAt(known.changes, at);
    const beacon = inForce < 0 || index === 0xffff ? undefined : known.changes[inForce].beacons[index];
    const point = beacon ? pointOf(beacon) : undefined;
    const [x, y] = scale(now);
    context.strokeStyle = colours.loss;
    context.lineWidth = 1.5;
    if (point !== undefined) {
      const [bx, by] = scale(point);
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(bx, by);
      context.stroke();
    }
    context.beginPath();
    context.arc(x, y, 5, 0, 2 * Math.PI);
    context.fillStyle = colours.loss;
    context.fill();
  }

  /** Where a centroid came from. */
  function trail(context, scale, number, index, colours) {
    context.strokeStyle = colours.muted;
    context.lineWidth = 1;
    context.beginPath();
    let begun = false;
    for (let change = Math.max(0, number - TRAIL); change <= number; change++) {
      const beacon = known.changes[change].beacons[index];
      const point = beacon && pointOf(beacon);
      if (point === undefined || beacon === undefined) continue;
      const [x, y] = scale(point);
      if (begun) context.lineTo(x, y);
      else context.moveTo(x, y);
      begun = true;
    }
    context.stroke();
  }

  function legend(context, height, colours, dark) {
    const items = {
      time: [["early", css(apart(0, dark))], ["late", css(apart(1, dark))]],
      phase: [["prompt (square)", colours.muted], ["think", colours.accent], ["answer", colours.back]],
      trt: [["revisit (large)", colours.loss], ["other", colours.muted]],
      beacon: [["by number of the nearest beacon", colours.muted]],
    }[colouring];
    let x = 10;
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (const [text, colour] of items) {
      context.fillStyle = colour;
      context.fillRect(x, height - 14, 9, 9);
      context.fillStyle = colours.muted;
      context.fillText(text, x + 14, height - 9);
      x += context.measureText(text).width + 30;
    }
  }

  function scales(width, height) {
    const pad = 18;
    const x = linear(known.rangeX, [pad, width - pad]);
    const y = linear(known.rangeY, [height - pad - 10, pad]);
    return (index) => [x(known.x[index]), y(known.y[index])];
  }

  function nearestPoint(x, y, width, height) {
    if (!known) return null;
    const scale = scales(width, height);
    let best = null;
    for (let index = 0; index < known.position.length; index++) {
      const [px, py] = scale(index);
      const gap = Math.hypot(px - x, py - y);
      if (gap < 10 && (!best || gap < best.gap)) best = { position: known.position[index], gap };
    }
    return best;
  }

  function read() {
    const name = `space.${store.state.head}`;
    if (!data.pack.has(`${name}.${space}.x`)) {
      known = null;
      return;
    }
    const position = data.pack.array(`${name}.position`);
    const x = data.pack.numbers(`${name}.${space}.x`);
    const y = data.pack.numbers(`${name}.${space}.y`);
    known = {
      position, x, y,
      at: new Map(Array.from(position, (value, index) => [value, index])),
      rangeX: extent(x), rangeY: extent(y),
      method: data.pack.manifest[`${name}.${space}.x`].method,
      changes: beaconChanges(data.pack, store.state.head),
    };
  }

  function refresh() {
    read();
    if (!known && space === "pre-rope" && data.pack.has(`space.${store.state.head}.post-rope.x`)) {
      space = "post-rope";
      pickSpace.mark(space);
      read();
    }
    setUntil(until);
  }

  function setUntil(step) {
    until = Math.max(0, Math.min(data.length - 1, step));
    slider.value = String(until);
    const beacons = known ? beaconsNow().length : 0;
    said.textContent = `step ${count(until)}${known?.changes.length ? ` · ${beacons} beacons` : ""}`;
    chart.redraw();
  }

  function stop() {
    if (playing) cancelAnimationFrame(playing);
    playing = null;
    play.textContent = "▶";
    play.setAttribute("aria-label", "Play");
  }

  /** Play from here to the end in about twelve seconds, or stop. */
  function toggle() {
    if (playing) {
      stop();
      return;
    }
    if (until >= data.length - 1) until = Math.max(0, data.plain.trace.prompt_length - 1);
    play.textContent = "❚❚";
    play.setAttribute("aria-label", "Pause");
    let last = performance.now();
    let exact = until;
    const go = (now) => {
      exact += ((now - last) / 12_000) * data.length;
      last = now;
      setUntil(Math.floor(exact));
      if (exact < data.length - 1) playing = requestAnimationFrame(go);
      else stop();
    };
    playing = requestAnimationFrame(go);
  }

  store.listen(["head"], refresh);
  store.listen(["token", "beacon"], () => chart.redraw());
  refresh();
  return { chart, toggle, setUntil, known: () => known, until: () => until };
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low < high ? [low, high] : [low - 1, low + 1];
}
