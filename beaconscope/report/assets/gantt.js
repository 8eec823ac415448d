// Beacons as bars from birth to death.

import { beaconChanges, lifespans } from "./beaconing.js";
import { Chart, fitted, SMALL } from "./chart.js";
import { apart, css, isDark } from "./colour.js";
import { el } from "./dom.js";
import { mergeSpans, sourcesOf } from "./looking.js";
import { count, linear, percent, positionTicks } from "./numbers.js";

const BAR = 13;
const PLACE = { left: 128, right: 14, top: 20, bottom: 22 };
/** That are in view at once; the rest is reached by scrolling. */
const ROWS = 31;
const MOST_BARS = 400;

export function makeGantt(parent, store, jump) {
  const { data } = store;
  let lives = [];
  let hidden = 0;
  const about = el("div", { class: "about", "aria-live": "polite" });

  const chart = new Chart(parent, {
    id: "beacons",
    title: "Beacons",
    height: () => PLACE.top + Math.max(2, lives.length) * BAR + PLACE.bottom,
    caption: () => lives.length
      ? `Each bar is a beacon of ${store.head.name}, from the compression that chose it to the one that dropped it; ${isDark() ? "brighter" : "darker"} bars had more queries assigned to them. ${hidden ? `The ${count(hidden)} with fewest queries are left out of the picture, not of the data. ` : ""}${lives.length > ROWS ? `${count(lives.length)} of them: scroll for the rest. ` : ""}Click a bar to see what it was taken from and what it protects.`
      : "The beacons of the chosen head over time.",
    draw(context, { width, height, colours }) {
      context.font = SMALL;
      context.textBaseline = "middle";
      if (!lives.length) {
        context.fillStyle = colours.muted;
        context.fillText(whyNoBeacons(data, store.head), 4, 16);
        return;
      }
      const left = width < 620 ? 70 : PLACE.left;
      const scale = linear([0, data.length], [left, width - PLACE.right]);
      const most = Math.max(1, ...lives.map((life) => life.members));
      const dark = isDark();
      // Many is far from the ground, as on the attention map.
      const shade = (share) => css(apart(dark ? share : 1 - share, dark));
      context.textAlign = "center";
      for (const tick of positionTicks(0, data.length, 6)) {
        context.fillStyle = colours.line;
        context.fillRect(scale(tick), PLACE.top, 1, height - PLACE.top - PLACE.bottom);
        context.fillStyle = colours.muted;
        for (const y of [9, height - 10]) context.fillText(count(tick), Math.min(width - 14, scale(tick)), y);
      }
      lives.forEach((life, row) => {
        const y = PLACE.top + row * BAR;
        const chosen = store.state.beacon === life.key;
        context.fillStyle = chosen ? colours.loss : shade(Math.sqrt(life.members / most));
        // A change at a step is in force from the next position on.
        const [from, to] = [life.birth + 1, Math.min(data.length, life.end + 1)].map(scale);
        context.fillRect(from, y + 2, Math.max(2, to - from), BAR - 4);
        if (life.source >= 0) {
          context.fillStyle = colours.muted;
          context.fillRect(scale(life.source + 0.5) - 1, y + 4, 2, BAR - 8);
        }
        context.textAlign = "right";
        context.fillStyle = chosen ? colours.ink : colours.muted;
        const text = life.source >= 0 ? `${data.snippet(life.source, life.source + 1, 14)} ${count(life.source)}` : `centroid ${life.index}`;
        context.fillText(fitted(context, text, left - 12), left - 6, y + BAR / 2);
      });
      context.fillStyle = colours.ink;
      context.fillRect(scale(store.state.token + 0.5) - 0.5, PLACE.top, 1, height - PLACE.top - PLACE.bottom);
    },
    label: () => `${lives.length} beacons of head ${store.head.name}; up and down choose one`,
    hover({ y }) {
      const life = lives[Math.floor((y - PLACE.top) / BAR)];
      return life ? sayLife(life) : null;
    },
    click({ y }) {
      const life = lives[Math.floor((y - PLACE.top) / BAR)];
      if (life) choose(life);
    },
    key(event) {
      const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!by || !lives.length) return false;
      const now = lives.findIndex((life) => life.key === store.state.beacon);
      choose(lives[(now + by + lives.length) % lives.length]);
      return true;
    },
    table: () => ({
      columns: [
        { key: "beacon", name: "beacon" }, { key: "source", name: "taken from" }, { key: "birth", name: "birth" },
        { key: "death", name: "death" }, { key: "members", name: "queries assigned" }, { key: "text", name: "text" },
      ],
      rows: all().map((life) => ({
        beacon: life.index, source: life.source >= 0 ? life.source : null, birth: life.birth, death: life.death, members: life.members,
        text: life.source >= 0 ? data.snippet(Math.max(0, life.source - 3), life.source + 4) : "centroid",
      })),
    }),
  });
  chart.holder.classList.add("tall");
  chart.holder.style.setProperty("--tall", `${PLACE.top + ROWS * BAR}px`);
  chart.box.insertBefore(about, chart.box.querySelector("figcaption"));

  function all() {
    return lifespans(beaconChanges(data.pack, store.state.head), data.length);
  }

  function sayLife(life) {
    return [
      life.source >= 0 ? `taken from ${count(life.source)}: ${data.snippet(Math.max(0, life.source - 3), life.source + 4, 60)}` : `centroid ${life.index}`,
      `from ${count(life.birth)} to ${life.death === null ? "the end" : count(life.death)}`,
      `${count(life.members)} queries assigned`,
    ];
  }

  function choose(life) {
    store.set({ beacon: life.key });
  }

  /** What the chosen beacon was taken from, and what its query attends to: that is what it keeps in the cache. */
  function tell() {
    const life = lives.find((each) => each.key === store.state.beacon);
    if (!life) {
      about.replaceChildren();
      return;
    }
    const spans = life.source >= 0 ? mergeSpans(sourcesOf(data, data.recorded, life.source, store.state.head)).slice(0, 6) : [];
    about.replaceChildren(
      el("p", {}, sayLife(life).join(" · ")),
      spans.length
        ? el("p", {}, "Protects what its query looks at: ", spans.map((span, index) => [index ? ", " : "",
            el("button", { type: "button", class: "link", onclick: () => jump(span.start) }, data.snippet(span.start, span.stop, 30)),
            ` (${percent(span.mass)})`]).flat())
        : el("p", { class: "none" }, life.source < 0 ? "A centroid is a mean of queries; what it attends to is not recorded." : "Nothing is recorded of what its query attends to."),
    );
  }

  function refresh() {
    const every = all();
    const order = [...every].sort((a, b) => b.members - a.members).slice(0, MOST_BARS);
    const kept = new Set(order);
    hidden = every.length - kept.size;
    lives = every.filter((life) => kept.has(life));
    chart.redraw();
    tell();
  }
  store.listen(["head"], refresh);
  store.listen(["beacon", "token"], () => {
    chart.redraw();
    tell();
  });
  refresh();
  return { chart, lives: () => lives };
}

function whyNoBeacons(data, head) {
  if (data.heads.some((each) => each.beacons)) {
    return head.rank === undefined ? "No beacons of this head." : `No beacons are here of head ${head.name}; choose a brighter one in the grid.`;
  }
  return "The recording had no beacons (its cache kept none, and not as a shadow either).";
}
