// Tables: sorting, filtering, CSV.

/** Rows by a column; what is missing comes last either way. */
export function sortRows(rows, key, falling) {
  const sign = falling ? -1 : 1;
  return rows
    .map((row, index) => [row, index])
    .sort(([a, i], [b, j]) => {
      const one = a[key];
      const other = b[key];
      const gone = isMissing(one) - isMissing(other);
      if (gone || isMissing(one)) return gone || i - j;
      if (typeof one === "number" && typeof other === "number") return sign * (one - other) || i - j;
      return sign * String(one).localeCompare(String(other)) || i - j;
    })
    .map(([row]) => row);
}

function isMissing(value) {
  return value === null || value === undefined || value === "" || Number.isNaN(value) ? 1 : 0;
}

/** Rows in which every word of a filter is found in some column. */
export function filterRows(rows, filter) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return rows;
  return rows.filter((row) => {
    const text = Object.values(row).join("\u0000").toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

/** Rows as CSV with a head line. What a spreadsheet would take for a formula is made text. */
export function toCsv(columns, rows) {
  const lines = [columns.map((column) => csvCell(column.name))];
  for (const row of rows) lines.push(columns.map((column) => csvCell(row[column.key])));
  return `${lines.map((line) => line.join(",")).join("\r\n")}\r\n`;
}

function csvCell(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  let text = String(value);
  if (typeof value !== "number" && /^[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
