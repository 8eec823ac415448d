// Everything by keyboard.

import { byId, el } from "./dom.js";

export const KEYS = [
  ["← →", "previous, next token"],
  ["↑ ↓  or  [ ]", "previous, next sentence"],
  ["n  p", "next, previous revisit"],
  ["l  L", "layer up, down"],
  ["h  H", "next, previous head"],
  ["a", "all heads or one"],
  ["o", "attention as a full cache or as recorded"],
  ["+  −  0", "attention map: zoom in, out, whole"],
  ["space", "play or pause the query space"],
  ["/", "search the text; Enter for the next place"],
  ["t", "light or dark"],
  ["1 … 9", "go to a view"],
  ["?", "this list; Esc closes it"],
];

export function makeHelp() {
  const dialog = byId("help");
  dialog.replaceChildren(
    el("h2", {}, "Keyboard"),
    el("dl", { class: "keys" }, KEYS.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])),
    el("form", { method: "dialog" }, el("button", { autofocus: true }, "Close")),
  );
  byId("help-button").addEventListener("click", () => dialog.showModal());
}

/** The next position after `position` in a rising list, or the one before, around the ends. */
export function neighbour(positions, position, by) {
  if (!positions.length) return null;
  if (by > 0) return positions.find((each) => each > position) ?? positions[0];
  return positions.findLast((each) => each < position) ?? positions[positions.length - 1];
}

export function bindKeys({ store, grid, space, attention, toggleTheme, views }) {
  document.addEventListener("keydown", (event) => {
    const { target } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || target.closest?.("input, select, textarea, dialog, .js-plotly-plot")) return;
    // A focused button has the space bar for itself, and a chart its own keys.
    if (event.key === " " && target.closest?.("button")) return;
    const { data, state } = store();
    const token = (position) => store().set({ token: Math.max(0, Math.min(data.length - 1, position)), beacon: null });
    const sentence = (by) => token(data.sentences[Math.max(0, Math.min(data.sentences.length - 1, state.sentence + by))]);
    const acts = {
      ArrowLeft: () => token(state.token - 1),
      ArrowRight: () => token(state.token + 1),
      ArrowUp: () => sentence(-1),
      ArrowDown: () => sentence(1),
      "[": () => sentence(-1),
      "]": () => sentence(1),
      n: () => token(neighbour(data.revisitPositions, state.token, 1) ?? state.token),
      p: () => token(neighbour(data.revisitPositions, state.token, -1) ?? state.token),
      l: () => grid().moveHead(-1, 0),
      L: () => grid().moveHead(1, 0),
      h: () => grid().moveHead(0, 1),
      H: () => grid().moveHead(0, -1),
      a: () => store().set({ pooled: !state.pooled }),
      o: () => data.full && store().set({ over: state.over === "full" ? "recorded" : "full" }),
      "+": () => attention().around(0.5),
      "-": () => attention().around(2),
      0: () => store().set({ zoom: null }),
      " ": () => space().toggle(),
      "/": () => byId("query").focus(),
      t: toggleTheme,
      "?": () => byId("help").showModal(),
    };
    const view = /^[1-9]$/.test(event.key) ? views[Number(event.key) - 1] : undefined;
    const act = view ? () => byId(view)?.scrollIntoView({ behavior: "smooth", block: "start" }) : acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}
