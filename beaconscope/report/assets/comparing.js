// Two traces side by side: what differs.

import { frame } from "./chart.js";
import { el, plainTable } from "./dom.js";
import { count, decimal, percent } from "./numbers.js";

/** Positions from the start on at which both traces have the same text. */
export function commonPrefix(one, other) {
  const most = Math.min(one.length, other.length);
  let position = 0;
  while (position < most && one.token(position) === other.token(position)) position++;
  return position;
}

/** Spearman's rank correlation; NaN for fewer than three pairs. */
export function rankCorrelation(xs, ys) {
  if (xs.length < 3) return NaN;
  const a = ranks(xs);
  const b = ranks(ys);
  const mean = (xs.length + 1) / 2;
  let top = 0;
  let left = 0;
  let right = 0;
  for (let index = 0; index < a.length; index++) {
    top += (a[index] - mean) * (b[index] - mean);
    left += (a[index] - mean) ** 2;
    right += (b[index] - mean) ** 2;
  }
  return left && right ? top / Math.sqrt(left * right) : NaN;
}

function ranks(values) {
  const order = values.map((value, index) => [value, index]).sort((a, b) => a[0] - b[0]);
  const found = new Array(values.length);
  for (let start = 0; start < order.length; ) {
    let stop = start;
    while (stop + 1 < order.length && order[stop + 1][0] === order[start][0]) stop++;
    for (let index = start; index <= stop; index++) found[order[index][1]] = (start + stop) / 2 + 1;
    start = stop + 1;
  }
  return found;
}

/** What of the common text both caches, one of them and neither hold at its end, over the KV heads that both have. */
export function heldInCommon(one, other, prefix) {
  const result = { heads: 0, both: 0, first: 0, second: 0, neither: 0 };
  for (const { layer, kv } of one.plain.kv_heads) {
    if (!other.plain.kv_heads.some((head) => head.layer === layer && head.kv === kv)) continue;
    result.heads++;
    for (let position = 0; position < prefix; position++) {
      const [a, b] = [one, other].map((data) => {
        const at = data.evictedAt({ layer, kv }, position);
        return at === null || at >= prefix;
      });
      result[a && b ? "both" : a ? "first" : b ? "second" : "neither"]++;
    }
  }
  return result;
}

export function makeComparison(parent, [one, other], names) {
  const prefix = commonPrefix(one, other);
  const sets = [one, other].map((data) => new Set(data.revisitPositions.filter((position) => position < prefix)));
  const both = [...sets[0]].filter((position) => sets[1].has(position)).length;
  const rateIn = (data, head) => data.headByName.get(head.name)?.event_rate;
  const known = (rate) => rate !== null && rate !== undefined;
  const heads = one.heads.filter((head) => known(rateIn(one, head)) && known(rateIn(other, head)));
  const rates = [one, other].map((data) => heads.map((head) => rateIn(data, head)));
  const anchorsOf = (data) => new Map(data.plain.anchors.map((row) => [data.snippet(row.start, row.stop, 60), row.visits]));
  const anchors = [anchorsOf(one), anchorsOf(other)];
  const sentences = [...new Set([...anchors[0].keys(), ...anchors[1].keys()])]
    .map((text) => ({ what: `revisits of “${text}”`, a: anchors[0].get(text) ?? 0, b: anchors[1].get(text) ?? 0 }))
    .sort((x, y) => Math.abs(y.a - y.b) - Math.abs(x.a - x.b)).slice(0, 8);
  const held = heldInCommon(one, other, prefix);
  const of = (read) => ({ a: read(one), b: read(other) });
  const rows = [
    { what: "tokens", ...of((data) => count(data.length)), note: `the first ${count(prefix)} tokens are the same` },
    { what: "cache", ...of((data) => data.plain.trace.policy?.name ?? "unknown"), note: "" },
    { what: "revisits", ...of((data) => count(data.plain.revisits.length)), note: prefix ? `in the common text ${count(both)} at the same tokens, ${count(sets[0].size - both)} only in the first, ${count(sets[1].size - both)} only in the second` : "no common text" },
    { what: "revisit rate", ...of((data) => percent(data.plain.summary.revisit_rate, 1)), note: "" },
    { what: "distant attention lost", ...of((data) => (data.plain.cache.evicts ? percent(data.plain.cache.distant_lost) : "nothing evicted")), note: "" },
    { what: "heads that revisit", ...of((data) => count(data.heads.filter((head) => head.kind === "revisiting").length)), note: heads.length ? `event rates of ${count(heads.length)} shared heads: rank correlation ${decimal(rankCorrelation(...rates))}` : "no shared heads" },
    { what: "kept of the common text", a: held.heads && prefix ? percent((held.both + held.first) / (held.heads * prefix)) : "–", b: held.heads && prefix ? percent((held.both + held.second) / (held.heads * prefix)) : "–",
      note: held.heads && prefix ? `of what either kept, both kept ${percent(held.both / Math.max(1, held.both + held.first + held.second))}` : "" },
    ...sentences.map((row) => ({ ...row, a: count(row.a), b: count(row.b), note: "" })),
  ];
  const columns = [{ key: "what", name: "" }, { key: "a", name: `A: ${names[0]}` }, { key: "b", name: `B: ${names[1]}` }, { key: "note", name: "how they differ" }];
  frame(parent, {
    id: "compare",
    title: "Side by side",
    caption: "Two recordings. Positions are compared where their texts are the same from the start on; sentences are compared by their words. A and B at the top choose which of them the views below show.",
    table: () => ({ columns, rows }),
  }, el("div", { class: "compare" }, plainTable(columns, rows)));
}
