// Lines of text: where they break, and which of them are in view.

/**
 * The first token of each row. A row ends before the token that does not fit, and after one that ends a line.
 * A token wider than a row has a row of its own.
 */
export function breakRows(widths, endsLine, width) {
  const starts = [];
  let used = Infinity;
  for (let token = 0; token < widths.length; token++) {
    if (used + widths[token] > width && (used > 0 || token === 0)) {
      starts.push(token);
      used = 0;
    }
    used += widths[token];
    if (endsLine[token]) used = Infinity;
  }
  return Uint32Array.from(starts);
}

/** The row that a token is in. */
export function rowOf(starts, token) {
  let low = 0;
  let high = starts.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (starts[middle] <= token) low = middle;
    else high = middle;
  }
  return low;
}

/** Rows from first to before last that are in view, with some more on either side. */
export function visibleRows(scroll, height, rowHeight, rows, more = 6) {
  const first = Math.max(0, Math.floor(scroll / rowHeight) - more);
  const last = Math.min(rows, Math.ceil((scroll + height) / rowHeight) + more);
  return [first, Math.max(first, last)];
}

/**
 * Sums or means of `per` values after another; NaN where a part has none. Every part but the last is of as many values,
 * so that sums compare and a part lies where its values do.
 */
export function binned(values, per, how) {
  const result = new Float64Array(Math.ceil(values.length / per)).fill(NaN);
  const seen = new Float64Array(result.length);
  for (let index = 0; index < values.length; index++) {
    const value = values[index];
    if (Number.isNaN(value)) continue;
    const bin = Math.floor(index / per);
    seen[bin]++;
    result[bin] = seen[bin] === 1 ? value : result[bin] + value;
  }
  if (how === "mean") for (let bin = 0; bin < result.length; bin++) result[bin] /= seen[bin] || 1;
  return result;
}

/** Positions where a text begins, over token borders, ignoring case. */
export function findText(texts, query, most = 5000) {
  const wanted = query.toLowerCase();
  if (!wanted) return [];
  const starts = new Uint32Array(texts.length + 1);
  const pieces = texts.map((text) => text.replace(/\n/g, " ").toLowerCase());
  for (let index = 0; index < pieces.length; index++) starts[index + 1] = starts[index] + pieces[index].length;
  const whole = pieces.join("");
  const found = [];
  for (let at = whole.indexOf(wanted); at >= 0 && found.length < most; at = whole.indexOf(wanted, at + 1)) {
    let low = 0;
    let high = texts.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (starts[middle] <= at) low = middle;
      else high = middle;
    }
    if (found[found.length - 1] !== low) found.push(low);
  }
  return found;
}
