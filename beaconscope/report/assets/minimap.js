// The whole trace on one strip: revisits, what the cache lost and what it dropped, phases.

import { Chart, SMALL } from "./chart.js";
import { withAlpha } from "./colour.js";
import { binned } from "./layout.js";
import { count, decimal, linear, percent, positionTicks } from "./numbers.js";

/** Room to the left of the strips for their names; arcs below use the same, so that positions line up. */
export function gutter(width) {
  return width < 620 ? { left: 8, right: 8 } : { left: 88, right: 14 };
}

export const PHASES = ["prompt", "think", "answer"];

/** Phases as runs of tokens. */
export function phaseRuns(phase) {
  const runs = [];
  for (let position = 0; position < phase.length; position++) {
    const last = runs[runs.length - 1];
    if (last && last.phase === phase[position]) last.stop = position + 1;
    else runs.push({ phase: phase[position], start: position, stop: position + 1 });
  }
  return runs;
}

/** For each position the share of KV heads that had dropped it by the end, NaN where nothing is evicted. */
export function goneByEnd(data) {
  const gone = new Float64Array(data.length);
  if (!data.evicts) return gone.fill(NaN);
  for (const { layer, kv } of data.plain.kv_heads) {
    const at = data.pack.array(`evicted.${layer}.${kv}`);
    for (let position = 0; position < at.length; position++) if (at[position]) gone[position]++;
  }
  for (let position = 0; position < gone.length; position++) gone[position] /= data.plain.kv_heads.length;
  return gone;
}

export function makeMinimap(parent, store, windowOf, moveWindow) {
  const { data } = store;
  const gone = goneByEnd(data);
  const lost = data.pack.numbers("lost_share");
  const runs = phaseRuns(data.phase);
  const changes = new Set();
  for (const { compressions } of data.plain.kv_heads) for (const step of compressions) changes.add(step);
  const compressions = [...changes].sort((a, b) => a - b);
  const evicts = data.evicts;
  const rows = evicts ? { revisit: [4, 40], lost: [46, 62], gone: [66, 76], phase: [81, 88] } : { revisit: [4, 46], phase: [52, 59] };
  const height = evicts ? 106 : 78;
  let cache = null;

  /** Bars of at least two pixels, of as many tokens each. */
  function bins(width) {
    const per = Math.ceil(data.length / Math.max(1, Math.floor(width / 2)));
    if (!cache || cache.per !== per) {
      cache = {
        per,
        score: binned(data.score, per, "sum"),
        lost: binned(lost, per, "mean"),
        gone: binned(gone, per, "mean"),
      };
    }
    return cache;
  }

  function strip(context, values, [top, bottom], scale, colour, most) {
    context.fillStyle = colour;
    for (let bin = 0; bin < values.length; bin++) {
      const value = values[bin];
      if (!(value > 0) || !(most > 0)) continue;
      const tall = Math.max(1, (bottom - top) * Math.min(1, value / most));
      const [from, to] = edges(bin).map(scale);
      context.fillRect(from, bottom - tall, Math.max(1, to - from - 0.4), tall);
    }
  }

  /** First and past-the-last token of a bar. */
  function edges(bin) {
    return [bin * cache.per, Math.min(data.length, (bin + 1) * cache.per)];
  }

  /** All that does not move with the selection. */
  function strips(context, { width, colours }) {
    const { left, right } = gutter(width);
    const scale = linear([0, data.length], [left, width - right]);
    const { score } = bins(width - left - right);
    const best = Math.max(...score.filter((value) => !Number.isNaN(value)), 0);
    context.font = SMALL;
    context.textBaseline = "middle";
    context.fillStyle = colours.faint;
    for (const [top, bottom] of Object.values(rows)) context.fillRect(left, top, width - left - right, bottom - top);
    strip(context, score, rows.revisit, scale, colours.accent, best);
    if (evicts) {
      strip(context, cache.lost, rows.lost, scale, colours.loss, 1);
      for (let bin = 0; bin < cache.gone.length; bin++) {
        if (!(cache.gone[bin] > 0)) continue;
        const [from, to] = edges(bin).map(scale);
        context.fillStyle = withAlpha("#777777", 0.15 + 0.75 * cache.gone[bin]);
        context.fillRect(from, rows.gone[0], Math.max(1, to - from), rows.gone[1] - rows.gone[0]);
      }
      context.fillStyle = colours.ink;
      if (compressions.length < (width - left - right) / 4) {
        for (const step of compressions) context.fillRect(scale(step + 1), rows.gone[1] + 0.5, 1, 3.5);
      }
    }
    runs.forEach(({ phase, start, stop }) => {
      context.fillStyle = [colours.muted, colours.accent, colours.back][phase];
      context.globalAlpha = [0.55, 0.35, 0.8][phase];
      context.fillRect(scale(start), rows.phase[0], Math.max(1, scale(stop) - scale(start) - 1), rows.phase[1] - rows.phase[0]);
      context.globalAlpha = 1;
    });
    if (data.sentences.length < (width - left - right) / 3) {
      context.fillStyle = colours.paper;
      for (const start of data.sentences) context.fillRect(scale(start), rows.phase[0], 1, rows.phase[1] - rows.phase[0]);
    }
    context.fillStyle = colours.muted;
    const base = rows.phase[1] + 10;
    context.textAlign = "center";
    for (const tick of positionTicks(0, data.length, Math.max(2, Math.floor(width / 160)))) {
      if (tick > data.length) continue;
      context.fillText(count(tick), Math.min(width - 18, scale(tick)), base);
    }
    if (left > 20) {
      context.textAlign = "right";
      const names = evicts ? { revisit: "revisits", lost: "lost", gone: "dropped", phase: "phase" } : { revisit: "revisits", phase: "phase" };
      for (const [name, text] of Object.entries(names)) {
        context.fillText(text, left - 10, (rows[name][0] + rows[name][1]) / 2);
      }
    }
  }

  /** A picture of the strips, drawn anew when size or theme change. */
  let picture = null;
  function still(look) {
    const ratio = window.devicePixelRatio || 1;
    const key = [look.width, ratio, look.colours.paper, look.colours.ink].join();
    if (picture?.key !== key) {
      const canvas = document.createElement("canvas");
      canvas.width = Math.round(look.width * ratio);
      canvas.height = Math.round(height * ratio);
      const context = canvas.getContext("2d");
      context.scale(ratio, ratio);
      strips(context, look);
      picture = { key, canvas };
    }
    return picture.canvas;
  }

  const chart = new Chart(parent, {
    id: "minimap",
    title: "The whole trace",
    height,
    caption: () =>
      "Bars: score of the thought-revisiting tokens. " +
      (evicts
        ? "Lost: share of the distant attention on positions that the cache no longer had. Dropped: how many KV heads had dropped a position by the end; ticks are compressions. "
        : "The cache evicted nothing. ") +
      "Phase: prompt, thought, answer, cut at sentences. Drag to move the text, click to choose a token.",
    draw(context, look) {
      const { width, colours, live } = look;
      const { left, right } = gutter(width);
      const scale = linear([0, data.length], [left, width - right]);
      if (live) context.drawImage(still(look), 0, 0, width, height);
      else strips(context, look);
      const [first, last] = windowOf();
      context.strokeStyle = colours.ink;
      context.lineWidth = 1;
      context.strokeRect(scale(first) + 0.5, 1.5, Math.max(3, scale(last) - scale(first)), rows.phase[1] - 1);
      const x = scale(store.state.token + 0.5);
      context.fillStyle = colours.ink;
      context.fillRect(x - 0.75, 0, 1.5, rows.phase[1] + 3);
      context.beginPath();
      context.moveTo(x - 5, 0);
      context.lineTo(x + 5, 0);
      context.lineTo(x, 6);
      context.closePath();
      context.fill();
    },
    label: () =>
      `Minimap of ${count(data.length)} tokens with ${count(data.plain.revisits.length)} revisits; token ${store.state.token} is chosen`,
    hover({ x, width }) {
      const position = positionAt(x, width);
      const row = data.revisitAt.get(position);
      return [
        `token ${count(position)}: ${data.snippet(Math.max(0, position - 4), position + 5, 60)}`,
        `sentence ${data.sentence[position]}, ${PHASES[data.phase[position]]}`,
        row ? `revisit, score ${decimal(row.score)}` : "no revisit",
        evicts ? `dropped by ${percent(gone[position])} of the KV heads by the end` : "",
      ].filter(Boolean);
    },
    click: ({ x, width }) => store.set({ token: positionAt(x, width), beacon: null }),
    drag(start, now, end) {
      if (end || Math.abs(now.x - start.x) < 4) return;
      moveWindow(positionAt(now.x, now.width));
    },
    table: () => {
      const { left, right } = gutter(chart.width);
      const means = bins(chart.width - left - right);
      return {
        columns: [
          { key: "first", name: "first token" }, { key: "last", name: "last token" },
          { key: "score", name: "revisit score" }, { key: "lost", name: "share lost" }, { key: "gone", name: "dropped by the end" },
        ],
        rows: Array.from(means.score, (score, bin) => ({
          first: edges(bin)[0], last: edges(bin)[1] - 1,
          score, lost: means.lost[bin], gone: means.gone[bin],
        })),
      };
    },
  });

  function positionAt(x, width) {
    const { left, right } = gutter(width);
    return Math.max(0, Math.min(data.length - 1, Math.floor(linear([left, width - right], [0, data.length])(x))));
  }

  store.listen(["token"], () => chart.redraw());
  return chart;
}
