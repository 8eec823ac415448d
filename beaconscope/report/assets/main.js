// Read the data, make the views, bind them to one selection.

import { makeAnswers, makeCard } from "./answers.js";
import { makeArcs } from "./arcs.js";
import { makeAttention } from "./attention.js";
import { redrawAll } from "./chart.js";
import { isDark } from "./colour.js";
import { makeComparison } from "./comparing.js";
import { bytesOfBase64, inflate, inflateJson, TraceData } from "./data.js";
import { byId, choices, el } from "./dom.js";
import { makeGantt } from "./gantt.js";
import { makeGrid } from "./grid.js";
import { bindKeys, makeHelp } from "./keys.js";
import { makeMinimap } from "./minimap.js";
import { count } from "./numbers.js";
import { makeReading } from "./reading.js";
import { makeRevisits } from "./revisits.js";
import { makeClusterCurves, makeTradeOff } from "./series.js";
import { makeSpace } from "./space.js";
import { formatHash, parseHash, Store, traceOfHash } from "./state.js";

const VIEWS = ["view-minimap", "view-looks", "view-text", "view-revisits", "view-heads", "view-attention", "view-space", "view-beacons", "view-clusters"];

async function readTraces() {
  const traces = [];
  for (let number = 0; byId(`plain-${number}`); number++) {
    const [plain, buffer] = await Promise.all([
      inflateJson(byId(`plain-${number}`).textContent),
      inflate(bytesOfBase64(byId(`pack-${number}`).textContent)),
    ]);
    traces.push(new TraceData(plain, buffer));
    byId(`plain-${number}`).textContent = "";
    byId(`pack-${number}`).textContent = "";
  }
  return traces;
}

const current = { store: null, views: null, address: 0 };

/** Make all views of one trace. */
function show(traces, number, about) {
  const main = byId("main");
  main.replaceChildren();
  const data = traces[number];
  const store = new Store(data, number);
  store.state = parseHash(location.hash, store.state, data);
  current.store = store;
  const names = traces.map((trace) => trace.plain.name);

  if (traces.length > 1) makeComparison(added(main, "section"), traces, names);
  const jump = (position) => store.set({ token: position, beacon: null });
  makeAnswers(main, store, jump);
  const timeline = added(main, "section", "timeline");
  let reading = null;
  const minimap = makeMinimap(timeline, store, () => reading?.window() ?? [0, 0], (position) => reading?.reveal(position));
  const arcs = makeArcs(timeline, store, jump);
  const first = added(main, "section", "pair wide-left");
  reading = makeReading(first, store, arcs.looks);
  first.append(el("div", { class: "chart" }, arcs.list));
  reading.onMove(() => minimap.redraw());
  makeRevisits(main, store, jump);
  const second = added(main, "section", "pair");
  const attention = makeAttention(second, store, jump);
  const right = added(second, "div", "stack");
  const grid = makeGrid(right, store);
  const clusters = makeClusterCurves(right, store);
  const third = added(main, "section", "pair");
  const space = makeSpace(third, store, jump);
  const gantt = makeGantt(third, store, jump);
  const tradeoff = makeTradeOff(main, store);
  makeCard(main, store, about);
  current.views = { minimap, arcs, reading, attention, grid, space, gantt, clusters, tradeoff };

  const tell = () => {
    const { state } = store;
    // Browsers limit how often the address may change, so it follows when the selection rests.
    clearTimeout(current.address);
    current.address = setTimeout(() => history.replaceState(null, "", formatHash(state, data, number)), 120);
    byId("readout").textContent =
      `token ${count(state.token)} “${data.snippet(state.token, state.token + 1, 16)}” · sentence ${count(state.sentence)} · ${sayHead(store)}`;
  };
  store.listen(["token", "sentence", "head", "pooled", "beacon", "over", "zoom"], tell);
  tell();
}

/** Whose attention is shown. A head stays chosen while all are shown, for the views that are of one head. */
function sayHead({ head, state }) {
  const one = `layer ${head.layer}, head ${head.kv}.${head.group}`;
  return state.pooled ? `attention of all heads; beacons and queries of ${one}` : one;
}

/** A new element at the end of another. */
function added(parent, name, className = "") {
  const element = el(name, className ? { class: className } : {});
  parent.append(element);
  return element;
}

const THEMES = ["light", "dark"];

function applyTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  redrawAll();
  current.views?.reading.retheme();
  current.views?.clusters.redraw();
  current.views?.tradeoff.redraw();
}

function remembered(value) {
  // A page opened from disk may be denied storage; the theme is then that of the system each time.
  try {
    if (value) localStorage.setItem("beaconscope-theme", value);
    return localStorage.getItem("beaconscope-theme");
  } catch {
    return null;
  }
}

function toggleTheme() {
  const next = isDark() ? "light" : "dark";
  remembered(next);
  applyTheme(next);
}

function bindSearch() {
  const field = byId("query");
  const said = byId("found");
  let places = [];
  let at = -1;
  let searched = null;
  const search = () => {
    searched = current.store;
    places = current.views.reading.find(field.value);
    at = -1;
    said.textContent = field.value ? (places.length ? count(places.length) : "none") : "";
  };
  const go = (by) => {
    // Another trace may be shown since.
    if (searched !== current.store) search();
    if (!places.length) return;
    at = (at + by + places.length) % places.length;
    current.store.set({ token: places[at], beacon: null });
    said.textContent = `${count(at + 1)} of ${count(places.length)}`;
  };
  field.addEventListener("input", search);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") field.blur();
  });
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    go(1);
  });
}

async function start() {
  const began = performance.now();
  const saved = remembered();
  if (THEMES.includes(saved)) document.documentElement.dataset.theme = saved;
  const about = await inflateJson(byId("about").textContent);
  const traces = await readTraces();
  makeHelp();
  let shown = traceOfHash(location.hash, traces.length);
  if (traces.length > 1) {
    const switcher = choices("Trace", traces.map((trace, number) => [number, "AB"[number], trace.plain.name]), shown, (number) => {
      shown = number;
      history.replaceState(null, "", `#trace=${number}`);
      show(traces, number, about);
    });
    byId("traces").replaceWith(switcher);
    switcher.id = "traces";
  }
  show(traces, shown, about);
  bindKeys({
    store: () => current.store, grid: () => current.views.grid, space: () => current.views.space,
    attention: () => current.views.attention, toggleTheme, views: VIEWS,
  });
  bindSearch();
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  byId("theme").addEventListener("click", toggleTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => applyTheme());
  addEventListener("hashchange", () => {
    const { store } = current;
    const wanted = traceOfHash(location.hash, traces.length);
    if (wanted !== store.trace) show(traces, wanted, about);
    else store.set(parseHash(location.hash, store.state, store.data));
  });
  addEventListener("beforeprint", () => {
    redrawAll(true);
    for (const series of [current.views?.clusters, current.views?.tradeoff]) void series?.redraw(true);
  });
  // For tests, and for whoever wants the numbers at the browser's console.
  window.beaconscope = { traces, get state() { return current.store.state; }, get views() { return current.views; }, get store() { return current.store; } };
  document.documentElement.dataset.ready = (performance.now() - began).toFixed(0);
}

start().catch((error) => {
  const loading = byId("loading") ?? byId("main");
  loading.textContent = `This report could not be drawn: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
