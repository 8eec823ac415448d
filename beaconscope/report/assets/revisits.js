// The table of thought-revisiting tokens.

import { el, saveAs } from "./dom.js";
import { count, decimal, percent } from "./numbers.js";
import { filterRows, sortRows, toCsv } from "./tables.js";

const SHOWN = 200;
const TRUTH = "“found” where it looks back at a place that the task says the next token needs, “elsewhere” where the next token needs a place and it looks back at others, “not needed” where the next token needs none";

/** One row per revisit, with all that is known of it. */
export function revisitRows(data) {
  return data.plain.revisits.map((row) => {
    const lost = data.lostAt.get(row.position);
    const truth = data.truthAt.get(row.position + 1);
    const needed = truth && data.plain.targets.length
      ? (data.targetsAt.get(row.position) ?? []).some((target) => truth.sources.some(([start, stop]) => target.start < stop && start < target.stop))
      : false;
    return {
      position: row.position,
      writes: row.position + 1 < data.length ? data.snippet(row.position + 1, row.position + 2, 24) : "",
      before: data.snippet(Math.max(0, row.position - 4), row.position + 1, 40),
      score: row.score,
      q: row.q,
      reason: row.reason,
      heads: row.heads.length,
      names: row.heads.join(" "),
      target: data.snippet(row.target_start, row.target_stop, 60),
      at: row.target_start,
      share: row.target_share,
      distance: row.distance,
      period: row.target_period,
      lost: lost ? lost.lost_share : data.evicts ? 0 : null,
      gain: row.gain ?? null,
      needed: data.plain.truth ? (truth ? (needed ? "found" : "elsewhere") : "not needed") : null,
    };
  });
}

export function makeRevisits(parent, store, jump) {
  const { data } = store;
  const rows = revisitRows(data);
  const columns = [
    { key: "position", name: "token", say: count, number: true, help: "position of the token that looks back" },
    { key: "before", name: "text", wide: true, help: "the token, with what stands before it" },
    { key: "writes", name: "writes", help: "the next token, which this step writes" },
    { key: "score", name: "score", say: decimal, number: true, help: "sum of the heads' aims: how strongly it looks back" },
    { key: "heads", name: "heads", say: count, number: true, help: "query heads that look back at once" },
    { key: "target", name: "looks back at", wide: true, help: "the span that draws most of it" },
    { key: "at", name: "at", say: count, number: true, help: "first position of that span" },
    { key: "share", name: "share", say: percent, number: true, help: "of the distant attention on that span" },
    { key: "distance", name: "back", say: count, number: true, help: "tokens back" },
    ...(data.evicts ? [{ key: "lost", name: "lost", say: percent, number: true, help: "of what it looked at, evicted before" }] : []),
    ...(rows.some((row) => row.gain !== null) ? [{ key: "gain", name: "gain", say: decimal, number: true, help: "nats that looking far back gave the next token" }] : []),
    ...(data.plain.truth ? [{ key: "needed", name: "truth", help: TRUTH }] : []),
    { key: "reason", name: "why", help: "together: more heads than chance; agree: heads on one place; alone: one head, strongly" },
  ];
  const every = [...columns, { key: "q", name: "q" }, { key: "names", name: "head names" }, { key: "period", name: "period looked at" }];
  let key = "score";
  let falling = true;
  let filter = "";
  let limit = SHOWN;

  const body = el("tbody");
  const heads = columns.map((column) =>
    el("th", { scope: "col", class: column.number ? "number" : "", title: column.help },
      el("button", { type: "button", "data-key": column.key, onclick: () => {
        falling = column.key === key ? !falling : Boolean(column.number) && column.key !== "position";
        key = column.key;
        fill();
      } }, column.name)));
  const field = el("input", { type: "search", placeholder: "Filter", "aria-label": "Filter the revisits", oninput: () => {
    filter = field.value;
    limit = SHOWN;
    fill();
  } });
  const number = el("span", { class: "said", "aria-live": "polite" });
  const more = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => {
    limit = Infinity;
    fill();
  } });
  const table = el("table", { class: "data revisits" }, el("thead", {}, el("tr", {}, heads)), body);
  const box = el("figure", { id: "view-revisits", class: "chart", "aria-labelledby": "title-revisits" },
    el("div", { class: "head" }, el("h2", { id: "title-revisits" }, "Thought-revisiting tokens"), el("div", { class: "controls" }, field, number)),
    rows.length ? el("div", { class: "table-wrap tall", tabindex: "0" }, table) : el("p", { class: "none" }, whyNoRevisits(data)),
    more,
    el("figcaption", { class: "foot" },
      el("p", { class: "caption" }, `A step revisits when its heads turn to one distant place more than chance allows (false discovery rate ${percent(data.plain.options.fdr)}), or when one head alone does so strongly. Distant is more than ${count(data.plain.summary.window)} tokens back. ${data.plain.truth ? `Truth: ${TRUTH}. ` : ""}Click a row to go there; n and p step through them.`),
      el("div", { class: "tools" }, el("button", { type: "button", class: "quiet", title: "Save as CSV", onclick: () =>
        saveAs("revisits.csv", new Blob([toCsv(every, sortRows(filterRows(rows, filter), key, falling))], { type: "text/csv" })) }, "CSV"))),
  );
  parent.append(box);

  function fill() {
    const found = sortRows(filterRows(rows, filter), key, falling);
    number.textContent = found.length === rows.length ? count(rows.length) : `${count(found.length)} of ${count(rows.length)}`;
    body.replaceChildren(...found.slice(0, limit).map((row) =>
      el("tr", { tabindex: "0", "data-position": String(row.position), "aria-selected": String(row.position === store.state.token), onclick: () => jump(row.position),
        onkeydown: (event) => event.key === "Enter" && jump(row.position) },
        columns.map((column) => el("td", { class: `${column.number ? "number" : ""}${column.wide ? " wide" : ""}` },
          column.say ? column.say(row[column.key]) : String(row[column.key] ?? "–"))))));
    more.hidden = found.length <= limit;
    more.textContent = `Show all ${count(found.length)}`;
    for (const head of heads) {
      const mine = head.firstChild.dataset.key === key;
      head.setAttribute("aria-sort", mine ? (falling ? "descending" : "ascending") : "none");
    }
  }
  store.listen(["token"], ({ token }) => {
    for (const row of body.children) row.setAttribute("aria-selected", String(Number(row.dataset.position) === token));
  });
  fill();
}

function whyNoRevisits(data) {
  const { summary } = data.plain;
  if (!summary.steps && summary.missing_steps) {
    return "No step is known of all heads: queries or keys are not finite.";
  }
  if (!summary.steps) {
    return `The trace is too short for revisits: a step counts once ${count(2 * summary.window)} tokens are before it, and the trace has ${count(data.length)}.`;
  }
  return "No token revisits: no step turned to a distant place more than chance allows.";
}
