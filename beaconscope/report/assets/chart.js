// A chart: a canvas with title, caption, controls, the numbers behind it, and ways to save it.

import { themeColours } from "./colour.js";
import { el, plainTable, saveAs, tip } from "./dom.js";
import { SvgContext } from "./svg.js";
import { toCsv } from "./tables.js";

export const FONT = "12px system-ui, sans-serif";
export const SMALL = "11px system-ui, sans-serif";

const charts = new Set();

/** Draw every chart anew; `all` also those that nobody sees. */
export function redrawAll(all = false) {
  for (const chart of charts) chart.redraw(all);
}

/**
 * Title, controls, caption and tools around a chart.
 * `table()` gives { columns: [{ key, name }], rows }; `svg()` the picture as text; `png()` a promise of a blob.
 */
export function frame(parent, { id, title, caption, controls = [], table, svg, png }, ...body) {
  const data = el("div", { class: "behind", hidden: true });
  const show = el("button", {
    type: "button", class: "quiet", "aria-expanded": "false", title: "The numbers behind it",
    onclick: () => {
      data.hidden = !data.hidden;
      show.setAttribute("aria-expanded", String(!data.hidden));
      show.textContent = data.hidden ? "Data" : "Hide data";
      if (!data.hidden) {
        const { columns, rows } = table();
        data.replaceChildren(plainTable(columns, rows));
      }
    },
  }, "Data");
  const tool = (text, act) => el("button", { type: "button", class: "quiet", title: `Save as ${text}`, onclick: act }, text);
  const tools = el(
    "div",
    { class: "tools", role: "group", "aria-label": `Numbers and files of ${title}` },
    show,
    tool("CSV", () => {
      const { columns, rows } = table();
      saveAs(`${id}.csv`, new Blob([toCsv(columns, rows)], { type: "text/csv" }));
    }),
    svg && tool("SVG", async () => saveAs(`${id}.svg`, new Blob([await svg()], { type: "image/svg+xml" }))),
    png && tool("PNG", async () => saveAs(`${id}.png`, await png())),
  );
  const said = el("p", { class: "caption" });
  const box = el(
    "figure",
    { id: `view-${id}`, class: "chart", "aria-labelledby": `title-${id}` },
    el("div", { class: "head" }, el("h2", { id: `title-${id}` }, title), el("div", { class: "controls" }, controls)),
    ...body,
    el("figcaption", { class: "foot" }, said, tools),
    data,
  );
  parent.append(box);
  const say = () => {
    said.textContent = typeof caption === "function" ? caption() : caption;
    if (!data.hidden) {
      const { columns, rows } = table();
      data.replaceChildren(plainTable(columns, rows));
    }
  };
  say();
  return { box, say, data };
}

/**
 * A chart on a canvas. `draw(context, { width, height, colours, svg, live })` draws it in CSS pixels; `live` where it is
 * the canvas on the page, `svg` where it is none.
 */
export class Chart {
  constructor(parent, spec) {
    this.spec = spec;
    this.canvas = el("canvas", { role: "img", tabindex: "0", "aria-label": spec.title });
    this.holder = el("div", { class: "canvas" }, this.canvas);
    const framed = frame(parent, { ...spec, svg: () => this.toSvg(), png: () => this.toPng() }, ...(spec.before ?? []), this.holder);
    this.box = framed.box;
    this.say = framed.say;
    this.visible = false;
    this.dirty = true;
    this.waiting = false;
    charts.add(this);
    new ResizeObserver(() => this.redraw()).observe(this.holder);
    new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      if (this.visible && this.dirty) this.redraw();
    }, { rootMargin: "200px" }).observe(this.holder);
    this.listen();
  }

  get width() {
    return Math.max(120, this.holder.clientWidth);
  }

  get height() {
    const { height } = this.spec;
    return typeof height === "function" ? height(this.width) : height;
  }

  /** Draw at the next frame; what nobody sees waits until it is seen. */
  redraw(all = false) {
    this.dirty = true;
    if (all) {
      this.paint();
      return;
    }
    if (this.waiting || !this.visible) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.paint();
    });
  }

  paint() {
    const started = performance.now();
    const { width, height } = this;
    const ratio = window.devicePixelRatio || 1;
    const { canvas } = this;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = FONT;
    this.spec.draw(context, { width, height, colours: themeColours(), live: true, svg: false });
    this.say();
    if (this.spec.label) {
      const label = this.spec.label();
      canvas.setAttribute("aria-label", label);
    }
    this.dirty = false;
    canvas.dataset.painted = String(Number(canvas.dataset.painted ?? 0) + 1);
    canvas.dataset.ms = (performance.now() - started).toFixed(1);
  }

  /** The chart as SVG text. */
  toSvg() {
    const { width, height } = this;
    const context = new SvgContext(width, height);
    context.font = FONT;
    const colours = themeColours();
    this.spec.draw(context, { width, height, colours, svg: true });
    return context.toString(colours.paper);
  }

  /** The chart as a PNG of twice its size. */
  toPng() {
    const { width, height } = this;
    const canvas = el("canvas", { width: 2 * width, height: 2 * height });
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    const colours = themeColours();
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, width, height);
    context.font = FONT;
    this.spec.draw(context, { width, height, colours, svg: false });
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  }

  listen() {
    const { canvas, spec } = this;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top, width: box.width, height: box.height };
    };
    canvas.addEventListener("pointermove", (event) => {
      if (this.drag) {
        spec.drag?.(this.drag, at(event), false);
        tip(null);
        return;
      }
      tip(spec.hover?.(at(event)) ?? null, event);
    });
    canvas.addEventListener("pointerleave", () => tip(null));
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.drag = at(event);
      if (spec.drag) {
        canvas.setPointerCapture(event.pointerId);
        spec.drag(this.drag, this.drag, false);
      }
    });
    canvas.addEventListener("pointerup", (event) => {
      const start = this.drag;
      this.drag = null;
      if (!start) return;
      const end = at(event);
      if (Math.hypot(end.x - start.x, end.y - start.y) < 4) spec.click?.(end, event);
      spec.drag?.(start, end, true);
    });
    canvas.addEventListener("pointercancel", () => {
      this.drag = null;
    });
    if (spec.key) {
      canvas.addEventListener("keydown", (event) => {
        if (spec.key(event)) {
          event.preventDefault();
          event.stopPropagation();
        }
      });
    }
    if (spec.double) canvas.addEventListener("dblclick", (event) => spec.double(at(event)));
    if (spec.wheel) {
      canvas.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.shiftKey) return;
        event.preventDefault();
        spec.wheel(at(event), event.deltaY);
      }, { passive: false });
    }
  }
}

/** Text cut so that it fits a width. */
export function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let letters = [...text];
  while (letters.length && context.measureText(`${letters.join("")}…`).width > width) {
    letters = letters.slice(0, Math.max(0, letters.length - Math.max(1, letters.length >> 3)));
  }
  return letters.length ? `${letters.join("")}…` : "";
}
