// Layers by heads: one measure of every query head, and the way to choose one.

import { Chart, SMALL } from "./chart.js";
import { cividis, inkOn } from "./colour.js";
import { picker } from "./dom.js";
import { count, decimal, percent } from "./numbers.js";

/** Measures of a head: how to read and say them, and what they mean. */
export function headMeasures(data) {
  const clusters = new Map(data.plain.clusters.filter((row) => row.space === "pre-rope").map((row) => [row.number, row]));
  const post = new Map(data.plain.clusters.filter((row) => row.space === "post-rope").map((row) => [row.number, row]));
  const beacons = new Map(data.plain.beacon_summary.map((row) => [row.number, row]));
  const known = (head, value) => (head.analyzed ? value : null);
  return [
    { key: "revisits", name: "revisits", of: (head) => known(head, head.revisits), say: (value) => count(value), help: "revisits in which the head takes part" },
    { key: "event_rate", name: "event rate", of: (head) => known(head, head.event_rate), say: (value) => percent(value, 1), help: "share of steps at which the head turns to one distant place" },
    { key: "distant_share", name: "long-range share", of: (head) => known(head, head.distant_share), say: (value) => percent(value), help: "median share of the attention farther back than the window, sinks aside" },
    { key: "silhouette", name: "silhouette", of: (head) => (clusters.get(head.number) ?? post.get(head.number))?.silhouette ?? null, say: (value) => decimal(value), help: "of the best clustering of its queries; only of the clustered heads" },
    { key: "coverage", name: "coverage", of: (head) => (beacons.has(head.number) ? 1 - beacons.get(head.number).mean_distance : null), say: (value) => decimal(value), help: "mean cosine of queries with their nearest beacon; only of the clustered heads" },
    { key: "retrieval", name: "retrieval score", of: (head) => known(head, head.retrieval), say: (value) => percent(value), help: "share of what it could copy from afar that it copied" },
    { key: "kurtosis", name: "receiver kurtosis", of: (head) => known(head, head.kurtosis), say: (value) => decimal(value, 1), help: "of the vertical score: high where a few sentences draw the head's attention" },
  ];
}

export function makeGrid(parent, store) {
  const { data } = store;
  const list = headMeasures(data);
  let measure = list[0];
  const layers = [...new Set(data.heads.map((head) => head.layer))].sort((a, b) => b - a);
  const across = Math.max(...layers.map((layer) => data.heads.filter((head) => head.layer === layer).length));
  const place = new Map();
  for (const layer of layers) data.heads.filter((head) => head.layer === layer).forEach((head, column) => place.set(head.number, [layers.indexOf(layer), column]));
  const PADDING = { left: 58, top: 24, bottom: 4 };
  const rowHeight = Math.max(22, Math.min(38, 260 / layers.length));

  function box(number, width) {
    const [row, column] = place.get(number);
    const wide = Math.min(64, (width - PADDING.left - 6) / across);
    return [PADDING.left + column * wide, PADDING.top + row * rowHeight, wide - 1.5, rowHeight - 1.5];
  }

  const chart = new Chart(parent, {
    id: "heads",
    title: "Layers × heads",
    height: PADDING.top + layers.length * rowHeight + PADDING.bottom,
    controls: [picker("Measure", list.map((each) => [each.key, each.name]), measure.key, (key) => {
      measure = list.find((each) => each.key === key);
      chart.redraw();
    })],
    caption: () => `Each cell is a query head: ${measure.name}, ${measure.help}. Hatched cells are not known. Click a cell, or use the arrow keys, to choose a head for every other view.`,
    draw(context, { width, colours }) {
      const values = data.heads.map((head) => measure.of(head));
      const most = Math.max(...values.filter((value) => value !== null && value !== undefined), 0);
      const least = Math.min(...values.filter((value) => value !== null && value !== undefined), 0);
      context.font = SMALL;
      context.textBaseline = "middle";
      context.textAlign = "right";
      context.fillStyle = colours.muted;
      layers.forEach((layer, row) => context.fillText(`layer ${layer}`, PADDING.left - 8, PADDING.top + row * rowHeight + rowHeight / 2));
      const top = data.heads.filter((head) => place.get(head.number)[0] === 0);
      context.textAlign = "center";
      for (const head of top) {
        const [x, , wide] = box(head.number, width);
        if (wide > 16) context.fillText(wide > 26 ? `${head.kv}.${head.group}` : head.group === 0 ? String(head.kv) : "", x + wide / 2, 12);
      }
      for (const head of data.heads) {
        const value = values[head.number];
        const [x, y, wide, tall] = box(head.number, width);
        if (value === null || value === undefined) {
          context.fillStyle = colours.faint;
          context.fillRect(x, y, wide, tall);
          context.strokeStyle = colours.line;
          context.lineWidth = 1;
          context.save();
          context.beginPath();
          context.rect(x, y, wide, tall);
          context.clip();
          context.beginPath();
          for (let offset = -tall; offset < wide; offset += 7) {
            context.moveTo(x + offset, y + tall);
            context.lineTo(x + offset + tall, y);
          }
          context.stroke();
          context.restore();
        } else {
          const colour = cividis(most > least ? (value - least) / (most - least) : 0);
          context.fillStyle = `rgb(${colour.join(",")})`;
          context.fillRect(x, y, wide, tall);
          if (wide > 26) {
            context.fillStyle = inkOn(colour);
            context.fillText(measure.say(value).replace(" %", wide > 40 ? " %" : ""), x + wide / 2, y + tall / 2 + 0.5);
          }
        }
      }
      const [x, y, wide, tall] = box(store.state.head, width);
      context.lineWidth = 2.5;
      context.strokeStyle = colours.paper;
      context.strokeRect(x - 0.5, y - 0.5, wide + 1, tall + 1);
      context.lineWidth = 2;
      context.strokeStyle = colours.ink;
      context.strokeRect(x - 2, y - 2, wide + 4, tall + 4);
    },
    label: () => `Head ${store.head.name} is chosen, ${measure.name} ${said(store.head)}; arrow keys choose another`,
    hover({ x, y, width }) {
      const head = headAt(x, y, width);
      if (!head) return null;
      return [`layer ${head.layer}, KV head ${head.kv}, query head ${head.group}`, head.kind ? `${head.kind} head` : "not analyzed",
        ...list.map((each) => (each.of(head) === null || each.of(head) === undefined ? null : `${each.name} ${each.say(each.of(head))}`)).filter(Boolean)];
    },
    click({ x, y, width }) {
      const head = headAt(x, y, width);
      if (head) store.set({ head: head.number, pooled: false, beacon: null });
    },
    key(event) {
      const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!by) return false;
      moveHead(by[0], by[1]);
      return true;
    },
    table: () => ({
      columns: [{ key: "head", name: "layer.KV head.query head" }, { key: "kind", name: "kind" }, ...list.map(({ key, name }) => ({ key, name }))],
      rows: data.heads.map((head) => ({ head: head.name, kind: head.kind ?? null, ...Object.fromEntries(list.map((each) => [each.key, each.of(head)])) })),
    }),
  });

  function said(head) {
    const value = measure.of(head);
    return value === null || value === undefined ? "unknown" : measure.say(value);
  }

  function headAt(x, y, width) {
    return data.heads.find((head) => {
      const [left, top, wide, tall] = box(head.number, width);
      return x >= left && x < left + wide + 1.5 && y >= top && y < top + tall + 1.5;
    });
  }

  /** Choose the head some rows and columns away. */
  function moveHead(down, right) {
    const [row, column] = place.get(store.state.head);
    const next = data.heads.find((head) => {
      const [r, c] = place.get(head.number);
      const inRow = data.heads.filter((other) => place.get(other.number)[0] === r).length;
      return r === (row + down + layers.length) % layers.length && c === Math.min(inRow - 1, (column + right + inRow) % inRow);
    });
    if (next) store.set({ head: next.number, pooled: false, beacon: null });
  }

  store.listen(["head"], () => chart.redraw());
  return { chart, moveHead };
}
