// Colours that the colour-blind can tell apart: Okabe-Ito for kinds, cividis for amounts.

export const OKABE_ITO = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#B8A800"];

// Sixteen support points of cividis (Nuñez, Anderton, Renslow 2018), from low to high.
const CIVIDIS = [
  [0, 34, 78], [0, 45, 103], [19, 56, 110], [44, 67, 108], [64, 78, 107], [81, 89, 109], [97, 100, 112],
  [112, 112, 116], [128, 123, 121], [144, 136, 120], [161, 148, 117], [179, 161, 112], [198, 175, 103],
  [218, 190, 90], [238, 205, 71], [254, 232, 56],
];

/** Red, green and blue of a share from 0 to 1. */
export function cividis(share) {
  const place = Math.min(1, Math.max(0, share)) * (CIVIDIS.length - 1);
  const below = Math.min(CIVIDIS.length - 2, Math.floor(place));
  const rest = place - below;
  return CIVIDIS[below].map((value, index) => Math.round(value + rest * (CIVIDIS[below + 1][index] - value)));
}

export function css(rgb) {
  return `rgb(${rgb.join(",")})`;
}

/** The part of cividis that can be told from the ground, dark or light: a share from 0 to 1 from dull to bright. */
export function apart(share, dark) {
  return cividis(dark ? 0.45 + 0.55 * share : 0.66 * share);
}

/** Black or white, whichever can be read on a colour. */
export function inkOn([red, green, blue]) {
  return 0.299 * red + 0.587 * green + 0.114 * blue > 130 ? "#111" : "#fff";
}

/** A hex colour with an opacity. */
export function withAlpha(hex, alpha) {
  const number = Number.parseInt(hex.slice(1), 16);
  return `rgba(${number >> 16},${(number >> 8) & 255},${number & 255},${Number(alpha.toFixed(3))})`;
}

/** Whether the page is dark now. */
export function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Colours of the current theme, from the style sheet. */
export function themeColours(element = document.documentElement) {
  const style = getComputedStyle(element);
  const named = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    paper: named("paper"),
    raised: named("raised"),
    ink: named("ink"),
    muted: named("muted"),
    line: named("line"),
    faint: named("faint"),
    accent: named("accent"),
    loss: named("loss"),
    back: named("back"),
  };
}
