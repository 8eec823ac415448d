// The first screen's four answers, and the run card.

import { el } from "./dom.js";
import { bytes, count, decimal, percent, plural } from "./numbers.js";

export function makeAnswers(parent, store, jump) {
  const { data } = store;
  const { plain } = data;
  const { summary } = plain;
  const item = (text, note, act, label) =>
    el("li", {}, el("button", { type: "button", class: "finding", onclick: act, title: label }, el("span", { class: "text" }, text), el("span", { class: "note" }, note)));
  const card = (id, question, value, unit, line, items, rows) =>
    el("section", { class: "answer", "aria-labelledby": `q-${id}` },
      el("h2", { id: `q-${id}` }, question),
      el("p", { class: "value" }, value, el("small", {}, unit)),
      el("p", { class: "line" }, line),
      el("ul", {}, items),
      rows ? el("p", { class: "caption" }, rows) : null);

  const anchors = plain.anchors;
  const what = card("what", "What is revisited", count(anchors.length), anchors.length === 1 ? " sentence" : " sentences",
    anchors.length ? periods(summary) : "No sentence is revisited.",
    anchors.slice(0, 3).map((row) => item(data.snippet(row.start, row.stop, 64), `${count(row.visits)}×`, () => jump(row.start), `sentence ${row.sentence}`)),
    anchors.length ? "The sentences looked back at most, and by how many revisits." : null);

  const best = plain.revisits.slice(0, 3);
  const distances = plain.revisits.map((row) => row.distance).sort((a, b) => a - b);
  const whence = card("whence", "From where", count(summary.revisits), summary.revisits === 1 ? " token looks back" : " tokens look back",
    summary.revisits ? `${percent(summary.revisit_rate, 1)} of ${count(summary.steps)} steps, half of them over at least ${count(distances[distances.length >> 1])} tokens.` : tooShort(data),
    best.map((row) => item(`${data.snippet(Math.max(0, row.position - 5), row.position + 1, 44)} ▸ ${row.position + 1 < data.length ? data.snippet(row.position + 1, row.position + 2, 18) : ""}`,
      decimal(row.score, 1), () => jump(row.position), `token ${row.position}, score ${decimal(row.score)}`)),
    best.length ? "Text up to the token that looks back ▸ what it writes next, and its score." : null);

  const busy = plain.heads.filter((head) => head.revisits > 0).sort((a, b) => b.revisits - a.revisits);
  const revisiting = plain.heads.filter((head) => head.kind === "revisiting").length;
  const which = card("which", "Which heads", count(revisiting), ` of ${count(plain.heads.length)} query heads`,
    busy.length ? "take part in a twentieth of the revisits or more." : "No head takes part in a revisit.",
    busy.slice(0, 3).map((head) => item(`layer ${head.layer}, head ${head.kv}.${head.group}`, percent(head.revisit_share),
      () => store.set({ head: head.number, pooled: false, beacon: null }), `${head.revisits} revisits; choose this head`)),
    busy.length ? "KV head and query head in its group, and the share of the revisits that it takes part in." : null);

  const { cache } = plain;
  const evicts = cache.evicts;
  const worst = plain.lost.slice(0, 3);
  const loss = card("lost", "What the cache lost", evicts ? percent(cache.revisit_lost ?? cache.distant_lost) : "0 %", evicts && cache.revisit_lost !== null && cache.revisit_lost !== undefined ? " of what revisits sought" : " of distant attention",
    evicts
      ? `${plural(cache.revisits_hit ?? 0, "revisit")} lost at least half; of all distant attention ${percent(cache.distant_lost)}.`
      : `The cache (${plain.trace.policy?.name ?? "unknown"}) evicted nothing.`,
    worst.map((row) => item(data.snippet(Math.max(0, row.lost_position - 3), row.lost_position + 4, 56), percent(row.lost_share),
      () => jump(row.position), `token ${row.position} sought position ${row.lost_position}, evicted at ${row.evicted_at}`)),
    evicts ? [
      worst.length ? "Text around a place that was gone, and how much of what a revisit sought was gone. " : "",
      "Sought: distant attention of the heads that turn back. A replay’s “lost” is of all attention of the revisits, near and far.",
    ].join("") : null);
  loss.classList.toggle("loss", Boolean(evicts));
  parent.append(el("div", { id: "answers" }, what, whence, which, loss));
}

function periods(summary) {
  const all = Object.values(summary.periods).reduce((sum, value) => sum + value, 0);
  if (!all) return "";
  const names = { prompt: "the prompt", early: "the early plan", later: "later thought", answer: "the answer" };
  const parts = Object.entries(summary.periods).filter(([, value]) => value).sort((a, b) => b[1] - a[1])
    .map(([name, value]) => `${percent(value / all)} ${names[name]}`);
  return `Looked back at: ${parts.join(", ")}.`;
}

function tooShort(data) {
  const { summary } = data.plain;
  if (summary.steps) return "No step stands out from chance.";
  return summary.missing_steps ? "The recording is not finite at any step." : "The trace is too short for revisits.";
}

/** What an analysis left out because it is not finite, in words; null where it left out nothing. */
function sayMissing(summary) {
  if (!summary.missing_vectors) return null;
  const heads = (summary.missing ?? []).map((head) => `layer ${head.layer} head ${head.kv_head} (${count(head.queries + head.keys)})`);
  const where = heads.length ? `: ${heads.join(", ")}` : "";
  const steps = summary.missing_steps ? `; ${plural(summary.missing_steps, "step")} left out, at which some head is not known` : "";
  return `${count(summary.missing_vectors)} queries or keys that are not finite${where}${steps}`;
}

export function makeCard(parent, store, about) {
  const { data } = store;
  const { trace, summary, verdict, left_out: leftOut } = data.plain;
  const { model, policy } = trace;
  const params = Object.entries(policy.params ?? {}).filter(([, value]) => value !== null && typeof value !== "object").map(([key, value]) => `${key} ${value}`).join(", ");
  const fact = (name, value) => (value ? [el("dt", {}, name), el("dd", {}, value)] : []);
  const phases = ["prompt", "think", "answer"].map((name, index) => [name, data.phase.filter((value) => value === index).length]).filter(([, size]) => size);
  parent.append(el("figure", { id: "view-card", class: "chart", "aria-labelledby": "title-card" },
    el("div", { class: "head" }, el("h2", { id: "title-card" }, "The run")),
    trace.whole ? null : el("p", { class: "notice" }, `The recording was cut short: ${trace.cut_reason ?? "it did not come to its end"}.`),
    el("p", { class: "verdict" }, verdict.text),
    verdict.would_change ? el("p", { class: "caption" }, `What would change this: ${verdict.would_change}.`) : null,
    el("dl", { class: "facts wide" },
      fact("model", [model.id || "unknown", model.revision ? ` · revision ${model.revision}` : "", model.dtype ? ` · ${model.dtype}` : "", model.parameters ? ` · ${count(model.parameters)} parameters` : ""].join("")),
      fact("tokens", `${count(trace.length)} (${phases.map(([name, size]) => `${count(size)} ${name}`).join(", ")})`),
      fact("recorded", `layers ${trace.layers.join(", ")}; ${count(data.heads.length)} query heads on ${count(data.plain.kv_heads.length)} KV heads`),
      fact("cache", `${policy.name ?? "unknown"}${params ? `: ${params}` : ""}`),
      fact("attention", `${summary.attention}; hits are over ${trace.attention_over}`),
      fact("text", trace.teacher_forced ? "given beforehand and read by the model (teacher-forced)" : null),
      fact("made on", [trace.created, trace.device, trace.timings?.tokens_per_second ? `${decimal(trace.timings.tokens_per_second, 1)} tokens/s` : null, trace.peak_memory?.host ? `${bytes(trace.peak_memory.host)} of memory` : null].filter(Boolean).join(" · ")),
      fact("versions", Object.entries(trace.versions).map(([name, value]) => `${name} ${value}`).join(", ")),
      fact("recorded by", [el("code", {}, trace.command), el("p", { class: "caption" }, "Put together from the options in the trace, which does not have the names of files; what is not said is at its default.")]),
      about.command ? fact("report by", el("code", {}, `${about.command}  (BeaconScope ${about.version}, ${about.made})`)) : null,
      fact("left out", leftOut.length ? el("ul", {}, leftOut.map((line) => el("li", {}, line))) : "nothing"),
      fact("missing", sayMissing(summary)),
      data.plain.redacted ? fact("redacted", "every token's text; the layout, numbers and positions are those of the trace") : null,
    ),
    data.plain.causal ? el("p", {}, sayCausal(data.plain.causal)) : null,
  ));
}

/** How the revisits compare with the gain, in words; a share of nothing is unknown. */
export function sayCausal(found) {
  const range = (share) => (share ? `${percent(share[0])} (${percent(share[1])} to ${percent(share[2])})` : "unknown");
  return `Does it matter? Of ${count(found.revisits)} revisits ${count(found.both)} gave the next token at least ${decimal(found.threshold, 1)} nat; precision ${range(found.precision)}, recall ${range(found.recall)}.`;
}
