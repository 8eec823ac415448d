// Scales, ticks and how numbers are said.

export function linear([d0, d1], [r0, r1]) {
  const slope = d1 === d0 ? 0 : (r1 - r0) / (d1 - d0);
  return (value) => r0 + (value - d0) * slope;
}

/** About so many round numbers from low to high. */
export function ticks(low, high, about = 5) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, about);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) {
    found.push(Number((index * step).toPrecision(12)));
  }
  return found;
}

/** Ticks of an axis of positions: whole numbers only. */
export function positionTicks(low, high, about = 5) {
  return ticks(low, high, about).filter(Number.isInteger);
}

// One formatter for all: making one for each number takes longer than everything else.
const WHOLE_NUMBERS = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function count(value) {
  return Number.isFinite(value) ? WHOLE_NUMBERS.format(value) : "–";
}

export function percent(share, digits = 0) {
  if (share === null || share === undefined || !Number.isFinite(share)) return "–";
  if (share > 0 && share < 0.5 * 10 ** -(digits + 2)) return `<${(10 ** -digits).toFixed(digits)} %`;
  return `${(100 * share).toFixed(digits)} %`;
}

export function decimal(value, digits = 2) {
  return value === null || value === undefined || !Number.isFinite(value) ? "–" : value.toFixed(digits);
}

export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${(value / size).toPrecision(3)} ${unit}`;
  }
  return `${value} bytes`;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
