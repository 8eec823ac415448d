// Series by Plotly: clusters over time, and what memory buys. Plotly is unpacked when the first of them comes into view.

import { frame } from "./chart.js";
import { OKABE_ITO, themeColours, withAlpha } from "./colour.js";
import { bytesOfBase64, inflate } from "./data.js";
import { byId, choices, el } from "./dom.js";
import { bytes, count, percent } from "./numbers.js";

let loading = null;

/** Plotly, run from the page itself: its hash is in the content-security-policy. */
function loadPlotly() {
  loading ??= (async () => {
    const source = new TextDecoder().decode(await inflate(bytesOfBase64(byId("plotly").textContent)));
    const script = document.createElement("script");
    script.textContent = source;
    document.head.append(script);
    if (!window.Plotly) throw new Error("Plotly did not start");
    return window.Plotly;
  })();
  return loading;
}

const MARKS = ["circle", "square", "diamond", "cross", "triangle-up", "star", "hexagon", "x"];
/** Of the controls: nothing keeps more than the oracle, and what keeps less than random eviction is worth nothing. */
const BOUNDS = { oracle: { symbol: "triangle-up-open", dash: "dash" }, random: { symbol: "triangle-down-open", dash: "dot" } };
const DASHES = ["solid", "dot", "dash", "longdash", "dashdot", "longdashdot"];

class Series {
  constructor(parent, spec) {
    this.spec = spec;
    this.plot = el("div", { class: "plot", role: "img", tabindex: "0", style: `height:${spec.height}px` });
    const framed = frame(parent, {
      ...spec,
      svg: async () => decodeURIComponent((await this.picture("svg")).split(",", 2)[1] ?? ""),
      png: async () => pngBlob(await this.picture("png")),
    }, this.plot);
    this.box = framed.box;
    this.say = framed.say;
    this.visible = false;
    new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      if (this.visible && !this.drawn) this.redraw();
    }, { rootMargin: "300px" }).observe(this.plot);
    new ResizeObserver(() => this.plot.data && window.Plotly?.Plots.resize(this.plot)).observe(this.plot);
  }

  async picture(format) {
    const Plotly = await loadPlotly();
    const { clientWidth: width, clientHeight: height } = this.plot;
    // Plotly gives SVG percent-encoded, so that no base64 has to be undone.
    return Plotly.toImage(this.plot, { format, width, height, scale: format === "png" ? 2 : 1 });
  }

  /** Draw; what nobody sees waits until it is seen, unless `all` is to be there (for a printer). */
  async redraw(all = false) {
    this.drawn = false;
    if (!this.visible && !(all && window.Plotly)) return;
    const { traces, layout, none } = this.spec.figure(themeColours());
    this.say();
    this.plot.setAttribute("aria-label", this.spec.label?.() ?? this.spec.title);
    if (!traces.length) {
      if (window.Plotly && this.plot.data) window.Plotly.purge(this.plot);
      this.plot.style.height = "auto";
      this.plot.replaceChildren(el("p", { class: "none" }, none));
      this.drawn = true;
      return;
    }
    this.plot.style.height = `${this.spec.height}px`;
    const Plotly = await loadPlotly();
    if (!this.plot.data) this.plot.replaceChildren();
    await Plotly.react(this.plot, traces, layout, { displayModeBar: false, responsive: false });
    this.drawn = true;
    this.plot.dataset.drawn = "yes";
  }
}

function pngBlob(url) {
  return new Blob([bytesOfBase64(url.split(",", 2)[1])], { type: "image/png" });
}

function layoutOf(colours, more) {
  const axis = { gridcolor: colours.line, zerolinecolor: colours.line, linecolor: colours.line, tickcolor: colours.line, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: colours.muted },
    margin: { l: 52, r: 14, t: 8, b: 40 }, hovermode: "closest",
    hoverlabel: { bgcolor: colours.paper, bordercolor: colours.line, font: { color: colours.ink } },
    legend: { orientation: "h", y: -0.24, x: 0 },
    ...more,
    xaxis: { ...axis, ...more.xaxis },
    yaxis: { ...axis, ...more.yaxis },
  };
}

export function makeClusterCurves(parent, store) {
  const { data } = store;
  const names = [["coverage", "coverage", "mean cosine of queries with their nearest beacon"], ["churn", "churn", "share of beacons that a change replaced"], ["silhouette", "silhouette", "of the last 300 queries, labelled by beacon"]];
  const curves = () => store.head.curves;
  const series = new Series(parent, {
    id: "clusters",
    title: "Clusters over time",
    height: 300,
    caption: () => curves()
      ? `Of ${store.head.name}, at ${count(curves().step.length)} compressions: ${names.map(([, name, what]) => `${name}, ${what}`).join("; ")}. Gaps are values that do not exist.`
      : "Coverage, churn and silhouette at each compression.",
    figure(colours) {
      const found = curves();
      if (found && names.every(([key]) => found[key].every((value) => value === null))) {
        return { traces: [], none: "There is nothing to measure: the only compression is the last step." };
      }
      if (!found) {
        return { traces: [], none: store.head.beacons ? "Measured for the heads that revisit most; choose one of them in the grid." : "This head has no recorded beacons." };
      }
      const traces = names.map(([key, name], index) => ({
        type: "scatter", mode: found.step.length > 30 ? "lines" : "lines+markers", name, x: found.step, y: found[key], connectgaps: false,
        line: { color: OKABE_ITO[[0, 5, 2][index]], dash: DASHES[index], width: 2 }, marker: { symbol: MARKS[index], size: 7 },
        hovertemplate: `${name} %{y:.3f} at %{x}<extra></extra>`,
      }));
      return { traces, layout: layoutOf(colours, { xaxis: { title: { text: "position of the compression", font: { size: 12 } }, range: [0, data.length] }, yaxis: { range: [Math.min(0, ...found.silhouette.filter((value) => value !== null)) - 0.04, 1.04] } }) };
    },
    table: () => ({
      columns: [{ key: "step", name: "compression at" }, ...names.map(([key, name]) => ({ key, name }))],
      rows: (curves()?.step ?? []).map((step, index) => ({ step, ...Object.fromEntries(names.map(([key]) => [key, curves()[key][index]])) })),
    }),
  });
  store.listen(["head"], () => series.redraw());
  return series;
}

/** Settings of a replay as curves: one for each policy and what is set beside the budget. */
export function curvesOf(settings, figure) {
  const groups = new Map();
  for (const row of settings) {
    if (row.policy === "full" || row[figure] === null || row.kv_bytes === null) continue;
    const { budget, interval, seed, ...rest } = row.params ?? {};
    const plainBeacon = row.policy === "beacon" ? (rest.selector === "none" || rest.beacons === 0 ? "recent only" : rest.selector === "random" ? "random queries" : `${rest.beacons} beacons`) : "";
    const name = plainBeacon ? `beacon, ${plainBeacon}` : row.policy;
    if (!groups.has(name)) groups.set(name, { name, policy: row.policy, points: [] });
    groups.get(name).points.push({ x: row.kv_bytes, y: row[figure], spread: row.spread, setting: row.setting, budget, interval, seed, live: row.live });
  }
  for (const group of groups.values()) group.points.sort((a, b) => a.x - b.x);
  return [...groups.values()];
}

/** Whether random eviction and the oracle are known at two budgets or more, so that there is something between them. */
function hasBand(groups) {
  return ["random", "oracle"].every((policy) => groups.some((group) => group.policy === policy && group.points.length > 1));
}

/** What the controls are and how they are drawn, as far as they are there. */
export function sayBounds(groups) {
  const known = new Set(groups.map((group) => group.policy));
  const said = [
    known.has("oracle") ? "▵ the oracle, which keeps what is going to be attended to: the most that can be kept" : null,
    known.has("random") ? "▿ random eviction: what a policy has to beat" : null,
  ].filter(Boolean).join("; ");
  const shape = hasBand(groups) ? "The band lies between the two." : groups.every((group) => group.points.length < 2) ? "One budget, so there are points and no curves." : "";
  return [said ? `${said}.` : "", shape].filter(Boolean).join(" ");
}

export function makeTradeOff(parent, store) {
  const { replay } = store.data.plain;
  const hasTrt = replay?.settings.some((row) => row.mass_trt !== null && row.mass_trt !== undefined);
  let figure = hasTrt ? "mass_trt" : "mass";
  const series = new Series(parent, {
    id: "tradeoff",
    title: "What memory buys",
    height: 340,
    controls: replay && hasTrt ? [choices("Attention of", [["mass_trt", "Revisits"], ["mass", "All tokens"]], figure, (value) => {
      figure = value;
      series.redraw();
    })] : [],
    caption: () => replay
      ? `Share of the attention ${figure === "mass_trt" ? "of thought-revisiting tokens" : "of all generated tokens"} that went to entries which a cache would have kept, against its keys and values in memory (log). ` +
        "It is of all attention, near and far, mean over the recorded heads; what is missing to 100 % is what replay calls lost. " +
        `${sayBounds(curvesOf(replay.settings, figure))} Bars: standard deviation over seeds${figure === replay.ranked_by ? "" : `, of ${replay.ranked_by} only, so not shown here`}. A replay is teacher-forced: its queries are those of the recording. ${replay.answer?.text ?? ""}`
      : "Memory against attention retained, per policy.",
    figure(colours) {
      if (!replay) return { traces: [], none: "No replay was given. Make one: beaconscope replay TRACE -o replay.parquet, then report TRACE --replay replay.parquet." };
      const groups = curvesOf(replay.settings, figure);
      const line = (group) => ({ x: group.points.map((point) => point.x), y: group.points.map((point) => point.y) });
      const random = groups.find((group) => group.policy === "random");
      const oracle = groups.find((group) => group.policy === "oracle");
      const traces = [];
      if (hasBand(groups)) {
        traces.push({ type: "scatter", mode: "lines", ...line(random), line: { width: 0 }, showlegend: false, hoverinfo: "skip" });
        traces.push({ type: "scatter", mode: "lines", ...line(oracle), fill: "tonexty", fillcolor: withAlpha("#808080", 0.12), line: { width: 0 }, showlegend: false, hoverinfo: "skip" });
      }
      let colour = 0;
      groups.forEach((group) => {
        const bound = BOUNDS[group.policy];
        const index = bound ? 0 : colour++;
        traces.push({
          type: "scatter", mode: "lines+markers", name: group.name, ...line(group),
          line: { color: bound ? colours.muted : OKABE_ITO[index % OKABE_ITO.length], dash: bound?.dash ?? DASHES[index % DASHES.length], width: bound ? 1.5 : 2.5 },
          marker: { symbol: bound?.symbol ?? MARKS[index % MARKS.length], size: bound ? 10 : 8 },
          error_y: figure === replay.ranked_by && group.points.some((point) => point.spread) ? { type: "data", array: group.points.map((point) => point.spread ?? 0), thickness: 1, width: 4 } : undefined,
          text: group.points.map((point) => `${point.setting}${point.live ? "" : " (replay only)"}<br>${bytes(point.x)}, ${percent(point.y, 1)}`),
          hovertemplate: "%{text}<extra></extra>",
        });
      });
      const xs = groups.flatMap((group) => group.points.map((point) => point.x)).filter((value) => value > 0);
      const [low, high] = [Math.log10(Math.min(...xs)), Math.log10(Math.max(...xs))];
      const at = [...new Set(xs)].sort((a, b) => a - b).filter((value, index, all) => !index || Math.log10(value / all[index - 1]) > 0.08);
      return {
        traces,
        layout: layoutOf(colours, {
          xaxis: { type: "log", title: { text: "keys and values, most at any time", font: { size: 12 } }, range: [low - 0.06, high + 0.06], tickvals: at, ticktext: at.map(bytes) },
          yaxis: { title: { text: "attention kept", font: { size: 12 } }, tickformat: ".0%" },
          legend: { orientation: "h", y: -0.3, x: 0 }, showlegend: true,
        }),
      };
    },
    table: () => ({
      columns: ["setting", "policy", "budget", "kv_bytes", "mass", "mass_trt", "spread", "hit_rate", "output_error", "regrets", "pareto"].map((key) => ({ key, name: key })),
      rows: (replay?.settings ?? []).map((row) => ({ ...row, pareto: row.pareto ? "yes" : "no" })),
    }),
  });
  return series;
}
