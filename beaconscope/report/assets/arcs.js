// Where the chosen token looks, and who looks at it: arcs over the whole trace, and the same as two lists.

import { Chart, fitted, SMALL } from "./chart.js";
import { choices, el } from "./dom.js";
import { lookersAt, mergeSpans, sourcesOf } from "./looking.js";
import { gutter } from "./minimap.js";
import { count, decimal, linear, percent } from "./numbers.js";

const MOST_ARCS = 24;

/** What is drawn for a selection: spans looked at, and steps that look back at the token or its whole sentence. */
export function looksOf(store, wholeSentence) {
  const { data, state, hits, shownHead } = store;
  const [start, stop] = wholeSentence ? data.sentenceRange(state.sentence) : [state.token, state.token + 1];
  const sources = sourcesOf(data, hits, state.token, shownHead);
  return {
    sources,
    spans: mergeSpans(sources),
    lookers: lookersAt(data, hits, start, stop, shownHead),
    target: [start, stop],
  };
}

/** Whether a span has an attention sink in it. */
function sinkTest(data) {
  const sinks = new Set(data.plain.summary.sinks.map((row) => row.position));
  return (span) => {
    for (let position = span.start; position < span.stop; position++) if (sinks.has(position)) return true;
    return false;
  };
}

export function headLabel(head) {
  return `layer ${head.layer}, KV head ${head.kv}, query head ${head.group}`;
}

export function makeArcs(parent, store, jump) {
  const { data } = store;
  let wholeSentence = false;
  let looks = looksOf(store, wholeSentence);
  const isSink = sinkTest(data);

  const pooled = choices("Heads", [[true, "All heads"], [false, "One head"]], store.state.pooled, (value) => store.set({ pooled: value }));
  const over = data.full
    ? choices("Attention", [
        ["full", "As a full cache", "Computed from the recorded queries and keys over everything; evicted sources are hollow"],
        ["recorded", "As recorded", "What the recording's cache still held"],
      ], store.state.over, (value) => store.set({ over: value }))
    : null;
  const whom = choices("Looked at", [[false, "Token"], [true, "Sentence"]], wholeSentence, (value) => {
    wholeSentence = value;
    refresh();
  });

  const half = 56;
  // Above the arcs, for the words of the places that are looked at.
  const lane = 18;
  const middle = lane + half + 7;
  const chart = new Chart(parent, {
    id: "looks",
    title: "Where it looks",
    height: lane + 2 * half + 14,
    controls: [pooled, over, whom],
    caption: () => {
      const whose = store.shownHead === null ? `mean over ${data.heads.length} query heads` : headLabel(store.head);
      const source = store.state.over === "full"
        ? `over everything recorded, computed for ${data.plain.full_steps}, else as recorded; hollow: the cache had dropped it; grey: a sink`
        : `as recorded, over ${data.plain.trace.attention_over}`;
      return `Above: what token ${count(store.state.token)} looks back at, the most attended places in words; below: what looks back at ${wholeSentence ? "its sentence" : "it"}. Thickness: attention, ${whose}, of each head's ${data.plain.trace.hits} most attended positions; ${source}.`;
    },
    draw(context, { width, colours }) {
      const { left, right } = gutter(width);
      const scale = linear([0, data.length], [left, width - right]);
      context.font = SMALL;
      context.strokeStyle = colours.line;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(left, middle + 0.5);
      context.lineTo(width - right, middle + 0.5);
      context.stroke();
      const here = scale(store.state.token + 0.5);
      const [start, stop] = looks.target;
      const arc = (from, to, mass, most, evicted, sign, colour) => {
        const tall = Math.min(half - 4, 10 + Math.abs(to - from) * 0.35);
        context.strokeStyle = evicted ? colours.loss : colour;
        context.globalAlpha = 0.25 + 0.65 * Math.min(1, mass / most);
        context.lineWidth = Math.max(0.8, 7 * Math.sqrt(Math.min(1, mass)));
        context.setLineDash(evicted ? [3, 3] : []);
        context.beginPath();
        context.moveTo(from, middle);
        context.bezierCurveTo(from, middle - sign * tall * 1.3, to, middle - sign * tall * 1.3, to, middle);
        context.stroke();
        context.setLineDash([]);
        context.globalAlpha = 1;
        context.lineWidth = 1.5;
        context.beginPath();
        context.arc(to, middle, 3, 0, 2 * Math.PI);
        context.fillStyle = evicted ? colours.paper : colour;
        context.fill();
        if (evicted) context.stroke();
      };
      const most = Math.max(1e-6, ...looks.spans.map((span) => span.mass));
      // Sinks are grey: they draw attention from everywhere and mean nothing by it.
      for (const span of looks.spans.slice(0, MOST_ARCS).reverse()) {
        arc(here, scale((span.start + span.stop) / 2), span.mass, most, span.evicted > span.mass / 2, 1, isSink(span) ? colours.muted : colours.accent);
      }
      const whoMost = Math.max(1e-6, ...looks.lookers.slice(0, MOST_ARCS).map((looker) => looker.mass));
      const at = scale((start + stop) / 2);
      for (const looker of looks.lookers.slice(0, MOST_ARCS).reverse()) {
        arc(at, scale(looker.position + 0.5), looker.mass, whoMost, looker.evicted > looker.mass / 2, -1, colours.back);
      }
      context.fillStyle = colours.ink;
      context.beginPath();
      context.arc(here, middle, 4.5, 0, 2 * Math.PI);
      context.fill();
      context.textBaseline = "middle";
      context.fillStyle = colours.muted;
      if (left > 20) {
        context.textAlign = "right";
        context.fillText("looks at", left - 10, middle - 14);
        context.fillText("looked at by", left - 10, middle + 15);
      }
      labels(context, looks.spans.filter((span) => !isSink(span) && span.start !== store.state.token).slice(0, 3), scale, width, colours);
    },
    label: () => {
      const best = looks.spans[0];
      return best
        ? `Token ${store.state.token} looks most at ${best.start} to ${best.stop - 1}, ${data.snippet(best.start, best.stop)}, with ${percent(best.mass, 1)}`
        : `Nothing is known of what token ${store.state.token} looks at`;
    },
    hover({ x, width, y }) {
      const found = nearest(x, width, y);
      if (!found) return null;
      return [
        data.snippet(Math.max(0, found.start - 3), found.stop + 3, 70),
        `${found.kind} ${count(found.start)}${found.stop - found.start > 1 ? ` to ${count(found.stop - 1)}` : ""}`,
        `attention ${percent(found.mass, 2)}${found.evicted > 0 ? `, ${percent(found.evicted / found.mass)} of it on evicted entries` : ""}`,
      ];
    },
    click({ x, width, y }) {
      const found = nearest(x, width, y);
      if (found) jump(found.start);
    },
    table: () => ({
      columns: [
        { key: "direction", name: "direction" }, { key: "start", name: "first position" }, { key: "stop", name: "past the last" },
        { key: "mass", name: "attention" }, { key: "evicted", name: "of it evicted" }, { key: "text", name: "text" },
      ],
      rows: [
        ...looks.spans.map((span) => ({ direction: "looks at", ...span, text: data.snippet(span.start, span.stop) })),
        ...looks.lookers.map((looker) => ({
          direction: "looked at by", start: looker.position, stop: looker.position + 1, mass: looker.mass,
          evicted: looker.evicted, text: data.snippet(looker.position, looker.position + 1),
        })),
      ],
    }),
  });

  /** The words of the places that are looked at, each above its place and joined with it. */
  function labels(context, spans, scale, width, colours) {
    context.textAlign = "center";
    let taken = [];
    for (const span of spans) {
      const x = scale((span.start + span.stop) / 2);
      const text = fitted(context, data.snippet(span.start, Math.max(span.stop, span.start + 1), 26), 130);
      const wide = context.measureText(text).width / 2 + 6;
      const center = Math.min(width - wide - 4, Math.max(gutter(width).left + wide, x));
      if (taken.some(([a, b]) => center - wide < b && center + wide > a)) continue;
      taken = [...taken, [center - wide, center + wide]];
      context.strokeStyle = colours.line;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(x, lane - 2);
      context.lineTo(x, middle - 4);
      context.stroke();
      context.fillStyle = span.evicted > span.mass / 2 ? colours.loss : colours.accent;
      context.fillText(text, center, lane / 2);
    }
  }

  function nearest(x, width, y) {
    const { left, right } = gutter(width);
    const scale = linear([0, data.length], [left, width - right]);
    const above = y <= middle;
    const list = above
      ? looks.spans.slice(0, MOST_ARCS).map((span) => ({ ...span, kind: "looks at" }))
      : looks.lookers.slice(0, MOST_ARCS).map((each) => ({ ...each, start: each.position, stop: each.position + 1, kind: "looked at by" }));
    let best = null;
    for (const each of list) {
      const gap = Math.abs(scale((each.start + each.stop) / 2) - x);
      if (gap < 12 && (!best || gap < best.gap)) best = { ...each, gap };
    }
    return best;
  }

  const list = el("aside", { id: "detail", "aria-label": "The chosen token" });

  function refresh() {
    looks = looksOf(store, wholeSentence);
    pooled.mark(store.state.pooled);
    over?.mark(store.state.over);
    chart.redraw();
    fillDetail(list, store, looks, jump, isSink);
  }
  store.listen(["token", "head", "pooled", "over"], refresh);
  refresh();
  return { chart, list, looks: () => looks };
}

/** The chosen token in words: what it is, what it looks at, who looks at it. */
function fillDetail(list, store, looks, jump, isSink) {
  const { data, state } = store;
  const token = state.token;
  const revisit = data.revisitAt.get(token);
  const truth = data.truthAt.get(token + 1);
  const number = (name) => data.pack.numbers(name)[token];
  const fact = (name, value) => [el("dt", {}, name), el("dd", {}, value)];
  const spans = looks.spans.slice(0, 7);
  const most = Math.max(1e-9, ...spans.map((span) => span.mass));
  const row = (start, stop, mass, biggest, evicted, note) =>
    el("li", {}, el("button", { type: "button", class: evicted ? "span gone" : "span", onclick: () => jump(start) },
      el("span", { class: "amount" }, percent(mass, 1)),
      el("span", { class: "bar", style: `--share:${Math.min(1, mass / biggest).toFixed(3)}` }),
      el("span", { class: "text" }, around(data, start, stop)),
      el("span", { class: "where" }, `${count(start)}${note}`),
    ));
  const lookers = looks.lookers.slice(0, 5);
  const whoMost = Math.max(1e-9, ...lookers.map((each) => each.mass));
  list.replaceChildren(...[
    el("p", { class: "who" }, el("span", { class: "glyph" }, data.snippet(token, token + 1, 40)),
      token + 1 < data.length ? el("span", { class: "writes" }, "writes ", el("b", {}, data.snippet(token + 1, token + 2, 30))) : null),
    el("dl", { class: "facts" },
      fact("position", count(token)), fact("sentence", count(state.sentence)),
      fact("score", revisit ? decimal(revisit.score) : "no revisit"),
      fact("distant", percent(number("distant_share"))), fact("entropy", decimal(number("entropy"))),
      fact("surprise", decimal(-number("logprob"))),
      data.evicts ? fact("lost", percent(number("lost_share"))) : null,
      data.pack.has("gain") ? fact("gain", `${decimal(number("gain"))} nats`) : null,
    ),
    truth ? el("p", { class: "truth" }, "Had to look at ", truth.sources.map(([start, stop], index) => [
      index ? " or " : "", el("button", { type: "button", class: "link", onclick: () => jump(start) }, data.snippet(start, stop, 30)),
    ]).flat(), ` (${truth.kind})`) : null,
    el("h3", {}, "Looks back at"),
    spans.length
      ? el("ol", { class: "spans" }, spans.map((span) => row(span.start, span.stop, span.mass, most, span.evicted > span.mass / 2,
          span.evicted > span.mass / 2 ? " · evicted" : isSink(span) ? " · sink" : "")))
      : el("p", { class: "none" }, "No attention is recorded, or it was too weak for this page: see what was left out."),
    el("h3", {}, "Looked back at by"),
    lookers.length
      ? el("ol", { class: "spans by" }, lookers.map((each) => row(each.position, each.position + 1, each.mass, whoMost, each.evicted > each.mass / 2,
          each.evicted > each.mass / 2 ? " · evicted" : "")))
      : el("p", { class: "none" }, "No later token, as far as is recorded."),
  ].filter(Boolean));
}

/** Text of a span, with a little of what is around it where it is short. */
function around(data, start, stop) {
  if (stop - start >= 4) return data.snippet(start, stop, 60);
  return data.snippet(Math.max(0, start - 2), Math.min(data.length, stop + 2), 60);
}
