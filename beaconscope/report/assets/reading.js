// The text, a row of tokens at a time: only the rows in view are in the page.

import { frame } from "./chart.js";
import { OKABE_ITO, withAlpha, themeColours } from "./colour.js";
import { el, picker, tip } from "./dom.js";
import { breakRows, findText, rowOf, visibleRows } from "./layout.js";
import { PHASES } from "./minimap.js";
import { count, decimal, percent, plural } from "./numbers.js";

const ROW = 27;
const GUTTER = 54;
const FACE = '15px system-ui, -apple-system, "Segoe UI", sans-serif';

/** Measures that tokens can be coloured by: name, how a value is read and said, and what is the most. */
export function measures(data) {
  const numbers = (name) => data.pack.numbers(name);
  const found = [
    { key: "score", name: "TRT score", values: data.score, say: (value) => decimal(value), help: "how strongly a token revisits; 0 is none" },
    { key: "distant_share", name: "distant share", values: numbers("distant_share"), say: (value) => percent(value), help: "attention farther back than the window, mean over heads" },
    { key: "entropy", name: "entropy", values: numbers("entropy"), say: (value) => `${decimal(value)} nats`, help: "of the model's distribution for the token" },
    { key: "surprise", name: "surprise", values: numbers("logprob").map((value) => -value), say: (value) => `${decimal(value)} nats`, help: "minus log probability of the token" },
  ];
  if (data.evicts) found.push({ key: "lost_share", name: "lost", values: numbers("lost_share"), say: (value) => percent(value), help: "distant attention that the cache could not serve" });
  if (data.pack.has("gain")) found.push({ key: "gain", name: "gain", values: numbers("gain"), say: (value) => `${decimal(value)} nats`, help: "what looking far back gave the next token" });
  found.push({ key: "beacon", name: "beacon", values: null, say: (value) => `beacon ${value}`, help: "nearest beacon of the chosen head" });
  return found.map((measure) => ({ ...measure, most: measure.values ? highest(measure.values) : 1 }));
}

/** The 99th percentile, so that one outlier does not make all others pale. */
function highest(values) {
  const known = values.filter((value) => value > 0).sort();
  return known.length ? known[Math.min(known.length - 1, Math.floor(known.length * 0.99))] : 1;
}

export function makeReading(parent, store, looks) {
  const { data } = store;
  const list = measures(data);
  let measure = list[0];
  let rows = new Uint32Array([0]);
  let painted = [-1, -1];
  let marks = new Map();
  let colours = themeColours();

  const lineEnds = data.plain.dictionary.map((text) => (text.includes("\n") ? 1 : 0));
  const endsLine = data.text.map((index) => lineEnds[index]);
  const sheet = el("div", { class: "sheet", role: "presentation" });
  const pane = el("div", { class: "pane", id: "pane", tabindex: "0", role: "region", "aria-label": "Text of the trace" }, sheet);
  const legend = el("span", { class: "legend" });
  const choose = picker("Colour by", list.map((each) => [each.key, each.name]), measure.key, (key) => {
    measure = list.find((each) => each.key === key);
    paint(true);
    sayLegend();
  });
  frame(parent, {
    id: "text",
    title: "Text",
    controls: [el("label", { class: "inline" }, "Colour by ", choose), legend],
    caption: () => `${plural(data.length, "token")}. Ruled tokens revisit; boxed ones are what the chosen token looks at (dashed: evicted). A number at the margin begins a sentence; the bar beside it is the phase.`,
    table: () => ({
      columns: ["position", "text", "phase", "sentence", "score", "distant share", "entropy", "logprob", "lost share"].map((name) => ({ key: name, name })),
      rows: Array.from({ length: data.length }, (_, position) => ({
        position, text: data.token(position), phase: PHASES[data.phase[position]], sentence: data.sentence[position],
        score: data.score[position], "distant share": data.pack.numbers("distant_share")[position],
        entropy: data.pack.numbers("entropy")[position], logprob: data.pack.numbers("logprob")[position],
        "lost share": data.pack.numbers("lost_share")[position],
      })),
    }),
  }, pane);

  function widthsOf() {
    const context = document.createElement("canvas").getContext("2d");
    context.font = FACE;
    const known = data.plain.dictionary.map((text) => context.measureText(shown(text)).width + 0.6);
    const wide = new Float32Array(data.length);
    for (let position = 0; position < data.length; position++) wide[position] = known[data.text[position]];
    return wide;
  }
  const widths = widthsOf();

  function layOut() {
    const width = Math.max(120, pane.clientWidth - GUTTER - 26);
    rows = breakRows(widths, endsLine, width);
    sheet.style.height = `${rows.length * ROW + 8}px`;
    painted = [-1, -1];
    paint(true);
  }

  function beaconOf(position) {
    const nearest = data.pack.array(`beacons.${store.state.head}.nearest`);
    return nearest.length && nearest[position] !== 0xffff ? nearest[position] : NaN;
  }

  function valueAt(position) {
    return measure.values ? measure.values[position] : beaconOf(position);
  }

  function tokenSpan(position, begins) {
    const whole = shown(data.token(position));
    const text = begins ? whole.replace(/^ (?=\S)/, "") : whole;
    const value = valueAt(position);
    let style = "";
    if (measure.key === "beacon") {
      if (!Number.isNaN(value)) style = `background:${withAlpha(OKABE_ITO[value % OKABE_ITO.length], 0.3)}`;
    } else if (value > 0) {
      const strength = Math.min(1, value / measure.most);
      style = `background:${withAlpha(measure.key === "lost_share" ? colours.loss : colours.accent, 0.06 + 0.42 * strength)}`;
    }
    const marked = marks.get(position);
    const names = ["tok"];
    if (data.revisitAt.has(position)) names.push("trt");
    if (marked) names.push(marked);
    if (position === store.state.token) names.push("chosen");
    return el("span", { class: names.join(" "), style: style || null, "data-t": String(position) }, text || "·");
  }

  function rowElement(number) {
    const start = rows[number];
    const stop = rows[number + 1] ?? data.length;
    const sentence = data.sentence[start];
    let begins = null;
    for (let position = start; position < stop && begins === null; position++) {
      if (position === 0 || data.sentence[position] !== data.sentence[position - 1]) begins = data.sentence[position];
    }
    const tokens = [];
    for (let position = start; position < stop; position++) tokens.push(tokenSpan(position, position === start));
    return el("div", { class: `row in-${PHASES[data.phase[start]]}`, style: `top:${number * ROW}px`, "data-row": String(number) },
      el("span", { class: "margin", title: `sentence ${sentence}, ${PHASES[data.phase[start]]}` }, begins === null ? "" : String(begins)),
      el("span", { class: "line" }, tokens));
  }

  function paint(all = false) {
    const [first, last] = visibleRows(pane.scrollTop, pane.clientHeight, ROW, rows.length);
    if (!all && first === painted[0] && last === painted[1]) return;
    if (all || first > painted[1] || last < painted[0]) {
      sheet.replaceChildren(...Array.from({ length: last - first }, (_, index) => rowElement(first + index)));
    } else {
      for (let number = painted[0]; number < Math.min(first, painted[1]); number++) sheet.firstChild.remove();
      for (let number = painted[1] - 1; number >= Math.max(last, painted[0]); number--) sheet.lastChild.remove();
      for (let number = Math.min(painted[0], last) - 1; number >= first; number--) sheet.prepend(rowElement(number));
      for (let number = Math.max(painted[1], first); number < last; number++) sheet.append(rowElement(number));
    }
    painted = [first, last];
  }

  function mark() {
    marks = new Map();
    const { sources } = looks();
    const least = Math.max(0.01, (sources[0]?.mass ?? 0) / 12);
    for (const source of sources.slice(0, 24)) {
      if (source.position === store.state.token || source.mass < least) continue;
      marks.set(source.position, source.evicted > source.mass / 2 ? "source gone" : "source");
    }
  }

  function sayLegend() {
    const swatches = [0.06, 0.27, 0.48].map((alpha) =>
      el("i", { style: `background:${withAlpha(measure.key === "lost_share" ? colours.loss : colours.accent, alpha)}` }));
    legend.replaceChildren(...(measure.key === "beacon"
      ? ["eight colours, repeated; hover for the number"]
      : ["0", ...swatches, `${measure.say(measure.most)} and more`]));
    legend.title = measure.help;
  }

  const moved = new Set();
  let scrollWaits = false;
  pane.addEventListener("scroll", () => {
    if (scrollWaits) return;
    scrollWaits = true;
    requestAnimationFrame(() => {
      scrollWaits = false;
      paint();
      for (const tell of moved) tell();
    });
  }, { passive: true });
  const positionOf = (event) => {
    const token = event.target.closest?.("[data-t]");
    return token ? Number(token.dataset.t) : null;
  };
  pane.addEventListener("click", (event) => {
    const position = positionOf(event);
    if (position !== null) {
      // The text stays where it is; nothing is told of a token that is chosen already.
      keep = position !== store.state.token;
      store.set({ token: position, beacon: null });
    }
  });
  pane.addEventListener("pointermove", (event) => {
    const position = positionOf(event);
    tip(position === null ? null : [
      `${count(position)} ${data.snippet(position, position + 1, 60)}`,
      `sentence ${data.sentence[position]}, ${PHASES[data.phase[position]]}`,
      ...list.map((each) => {
        const value = each.values ? each.values[position] : beaconOf(position);
        return Number.isNaN(value) ? null : `${each.name} ${each.say(value)}`;
      }).filter(Boolean),
    ], event);
  });
  pane.addEventListener("pointerleave", () => tip(null));

  let keep = false;
  function reveal(position, middle = true) {
    const top = rowOf(rows, position) * ROW;
    if (middle || top < pane.scrollTop || top > pane.scrollTop + pane.clientHeight - ROW) {
      pane.scrollTop = Math.max(0, top - pane.clientHeight / 2 + ROW);
    }
  }

  store.listen(["token", "head", "pooled", "over"], () => {
    mark();
    if (!keep) reveal(store.state.token, false);
    keep = false;
    paint(true);
  });
  new ResizeObserver(() => {
    layOut();
    reveal(store.state.token);
    for (const tell of moved) tell();
  }).observe(pane);
  mark();
  sayLegend();

  return {
    reveal,
    onMove: (tell) => moved.add(tell),
    retheme() {
      colours = themeColours();
      paint(true);
      sayLegend();
    },
    /** First and past-the-last token in view. */
    window() {
      const first = Math.min(rows.length - 1, Math.floor(pane.scrollTop / ROW));
      const last = Math.min(rows.length, Math.ceil((pane.scrollTop + pane.clientHeight) / ROW));
      return [rows[first] ?? 0, rows[last] ?? data.length];
    },
    find: (query) => findText(Array.from(data.text, (index) => data.plain.dictionary[index]), query),
  };
}

/** Text of a token with a sign for each line break. */
function shown(text) {
  return text.replace(/\n/g, "↵").replace(/\t/g, "→");
}
