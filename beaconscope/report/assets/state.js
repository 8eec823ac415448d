// The one selection that all views share. It lives in the URL's hash, so that a link to a finding can be shared.

const WHOLE = /^\d{1,9}$/;
const OVERS = ["recorded", "full"];

/** The start: what is chosen when the hash says nothing. */
export function firstState(data) {
  const best = data.plain.revisits[0];
  const order = [...data.heads].sort((a, b) => a.rank - b.rank);
  const token = best ? best.position : Math.max(0, data.length - 1);
  return {
    token,
    sentence: data.sentence[token] ?? 0,
    head: order[0].number,
    pooled: true,
    beacon: null,
    over: data.full ? "full" : "recorded",
    zoom: null,
  };
}

/** What a hash says, as far as it makes sense for this trace; the rest is as in `state`. */
export function parseHash(hash, state, data) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const next = { ...state };
  const number = (name, below) => {
    const text = given.get(name);
    return text !== null && WHOLE.test(text) && Number(text) < below ? Number(text) : null;
  };
  const token = number("t", data.length);
  const sentence = number("s", data.sentences.length);
  if (token !== null) {
    next.token = token;
    next.sentence = data.sentence[token];
  } else if (sentence !== null) {
    next.sentence = sentence;
    next.token = data.sentences[sentence];
  }
  const head = data.headByName.get(`${given.get("l")}.${given.get("h")}`);
  if (head) next.head = head.number;
  if (given.has("p")) next.pooled = given.get("p") !== "0";
  if (given.has("b")) next.beacon = /^[qc]\d{1,9}$/.test(given.get("b")) ? given.get("b") : null;
  if (OVERS.includes(given.get("o"))) next.over = data.full ? given.get("o") : "recorded";
  const zoom = /^(\d{1,9})-(\d{1,9})$/.exec(given.get("z") ?? "");
  if (zoom && Number(zoom[1]) < Number(zoom[2]) && Number(zoom[2]) <= data.length) {
    next.zoom = [Number(zoom[1]), Number(zoom[2])];
  }
  return next;
}

/** The trace that a hash asks for. */
export function traceOfHash(hash, count) {
  const text = new URLSearchParams(hash.replace(/^#/, "")).get("trace") ?? "0";
  return WHOLE.test(text) && Number(text) < count ? Number(text) : 0;
}

export function formatHash(state, data, trace = 0) {
  const head = data.heads[state.head];
  const parts = new URLSearchParams();
  if (trace) parts.set("trace", trace);
  parts.set("t", state.token);
  parts.set("s", state.sentence);
  parts.set("l", head.layer);
  parts.set("h", `${head.kv}.${head.group}`);
  parts.set("p", state.pooled ? 1 : 0);
  if (state.beacon) parts.set("b", state.beacon);
  if (data.full) parts.set("o", state.over);
  if (state.zoom) parts.set("z", state.zoom.join("-"));
  return `#${parts}`;
}

/** Holds the state and tells the views of a change, once a frame. */
export class Store {
  constructor(data, trace, schedule = (run) => requestAnimationFrame(run)) {
    this.data = data;
    this.trace = trace;
    this.state = firstState(data);
    this.listeners = [];
    this.schedule = schedule;
    this.waiting = false;
    this.changed = new Set();
  }

  /** Be told of changes of any of these names. */
  listen(names, listener) {
    this.listeners.push({ names, listener });
  }

  set(patch) {
    const next = { ...this.state, ...patch };
    if (patch.token !== undefined) next.sentence = this.data.sentence[next.token];
    for (const name of Object.keys(next)) if (next[name] !== this.state[name]) this.changed.add(name);
    this.state = next;
    if (!this.changed.size || this.waiting) return;
    this.waiting = true;
    this.schedule(() => this.tell());
  }

  tell() {
    this.waiting = false;
    const changed = this.changed;
    this.changed = new Set();
    for (const { names, listener } of this.listeners) {
      if (names.some((name) => changed.has(name))) listener(this.state, changed);
    }
  }

  get head() {
    return this.data.heads[this.state.head];
  }

  /** The query head whose attention is shown, null for all of them. */
  get shownHead() {
    return this.state.pooled ? null : this.state.head;
  }

  get hits() {
    return this.data.hits(this.state.over);
  }
}
