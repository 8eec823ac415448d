// Who looks at whom: what a token attends to, what attends to a span, and the attention map.

const GAP = 3;

/**
 * Sources of a step with their attention: of one query head, or the mean over all of them.
 * A source is evicted where a head that looked at it (only with full attention) had dropped it before.
 */
export function sourcesOf(data, hits, step, head) {
  const found = new Map();
  const scale = head === null ? 1 / data.heads.length : 1;
  for (let hit = hits.start[step]; hit < hits.start[step + 1]; hit++) {
    if (head !== null && hits.head[hit] !== head) continue;
    const source = hits.source[hit];
    const entry = found.get(source) ?? { position: source, mass: 0, evicted: 0 };
    const mass = hits.share(hit) * scale;
    entry.mass += mass;
    if (data.wasGone(hits.head[hit], source, step)) entry.evicted += mass;
    found.set(source, entry);
  }
  return [...found.values()].sort((a, b) => b.mass - a.mass || a.position - b.position);
}

/** Positions at most three apart make one span; spans by falling attention. */
export function mergeSpans(sources) {
  const ordered = [...sources].sort((a, b) => a.position - b.position);
  const spans = [];
  for (const source of ordered) {
    const last = spans[spans.length - 1];
    if (last && source.position - last.stop < GAP) {
      last.stop = source.position + 1;
      last.mass += source.mass;
      last.evicted += source.evicted;
    } else {
      spans.push({ start: source.position, stop: source.position + 1, mass: source.mass, evicted: source.evicted });
    }
  }
  return spans.sort((a, b) => b.mass - a.mass || a.start - b.start);
}

/** Steps that attend to any position from `start` to before `stop`, with their attention on it, most first. */
export function lookersAt(data, hits, start, stop, head) {
  const { start: first, order } = hits.bySource();
  const scale = head === null ? 1 / data.heads.length : 1;
  const found = new Map();
  for (let index = first[start]; index < first[stop]; index++) {
    const hit = order[index];
    if (head !== null && hits.head[hit] !== head) continue;
    const step = hits.step[hit];
    if (step < stop) continue;
    const entry = found.get(step) ?? { position: step, mass: 0, evicted: 0 };
    const mass = hits.share(hit) * scale;
    entry.mass += mass;
    if (data.wasGone(hits.head[hit], hits.source[hit], step)) entry.evicted += mass;
    found.set(step, entry);
  }
  return [...found.values()].sort((a, b) => b.mass - a.mass || a.position - b.position);
}

/** Index of the first hit of a step that is at least `step`. */
function from(hits, step) {
  return hits.start[Math.max(0, Math.min(step, hits.start.length - 1))];
}

/**
 * Largest attention of any hit in each cell of a grid over steps (rows) and sources (columns).
 * `gone` marks cells whose largest hit went to an evicted position. Cells without a hit stay 0: nothing is known of them.
 */
export function binByMax(data, hits, head, rows, columns, height, width) {
  const most = new Uint8Array(height * width);
  const gone = new Uint8Array(height * width);
  const perRow = height / (rows[1] - rows[0]);
  const perColumn = width / (columns[1] - columns[0]);
  const evicts = hits === data.full;
  const winner = new Uint32Array(evicts ? height * width : 0);
  const end = from(hits, rows[1]);
  for (let hit = from(hits, rows[0]); hit < end; hit++) {
    const source = hits.source[hit];
    if (source < columns[0] || source >= columns[1] || (head !== null && hits.head[hit] !== head)) continue;
    const row = Math.floor((hits.step[hit] - rows[0]) * perRow);
    const cell = row * width + Math.floor((source - columns[0]) * perColumn);
    if (hits.mass[hit] > most[cell]) {
      most[cell] = hits.mass[hit];
      // Which hit it was; asked once for each cell at the end.
      if (evicts) winner[cell] = hit;
    }
  }
  for (let cell = 0; cell < winner.length; cell++) {
    const hit = winner[cell];
    if (most[cell] && data.wasGone(hits.head[hit], hits.source[hit], hits.step[hit])) gone[cell] = 1;
  }
  return { most, gone };
}
