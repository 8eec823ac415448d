// What the page was given: typed arrays in one buffer, and plain values.

/** Decode base64. */
export function bytesOfBase64(text) {
  const binary = atob(text.trim());
  const bytes = new Uint8Array(binary.length);
  for (let index = 0; index < binary.length; index++) bytes[index] = binary.charCodeAt(index);
  return bytes;
}

/** Undo gzip. */
export async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

export async function inflateJson(text) {
  return JSON.parse(new TextDecoder().decode(await inflate(bytesOfBase64(text))));
}

const KINDS = {
  uint8: Uint8Array,
  uint16: Uint16Array,
  uint32: Uint32Array,
  int16: Int16Array,
  int32: Int32Array,
  float32: Float32Array,
};

/** Named arrays of a trace; each is read when it is first asked for. */
export class Pack {
  constructor(manifest, buffer) {
    this.manifest = manifest;
    this.buffer = buffer;
    this.known = new Map();
    this.views = new Map();
  }

  has(name) {
    return name in this.manifest;
  }

  /** The array as it was packed; empty where there is none. */
  array(name) {
    let view = this.views.get(name);
    if (!view) {
      const { type = "uint8", at = 0, shape = [0] } = this.manifest[name] ?? {};
      view = new KINDS[type](this.buffer, at, shape.reduce((product, size) => product * size, 1));
      this.views.set(name, view);
    }
    return view;
  }

  /** Numbers that were rounded to 8 or 16 bits; NaN where there is none. */
  numbers(name) {
    if (!this.known.has(name)) {
      const raw = this.array(name);
      const { low = 0, step = 1, type } = this.manifest[name] ?? {};
      const nothing = type === "uint8" ? 0xff : 0xffff;
      const numbers = new Float64Array(raw.length);
      for (let index = 0; index < raw.length; index++) numbers[index] = raw[index] === nothing ? NaN : low + step * raw[index];
      this.known.set(name, numbers);
    }
    return this.known.get(name);
  }
}

/** Hits in order of the position that attends. */
export class Hits {
  constructor(pack, name) {
    const counts = pack.array(`${name}.count`);
    const back = pack.array(`${name}.back`);
    this.head = pack.array(`${name}.head`);
    this.mass = pack.array(`${name}.mass`);
    this.start = new Uint32Array(counts.length + 1);
    this.source = new Uint32Array(back.length);
    this.step = new Uint32Array(back.length);
    for (let step = 0; step < counts.length; step++) {
      const end = this.start[step] + counts[step];
      for (let hit = this.start[step]; hit < end; hit++) {
        this.source[hit] = step - back[hit];
        this.step[hit] = step;
      }
      this.start[step + 1] = end;
    }
    this.reversed = null;
  }

  get length() {
    return this.source.length;
  }

  /** The same, with the hits of `other` at steps that have none here. */
  filledFrom(other) {
    const steps = this.start.length - 1;
    const pieces = [];
    for (let step = 0; step < steps; step++) {
      const from = this.start[step] === this.start[step + 1] ? other : this;
      const last = pieces[pieces.length - 1];
      if (last && last.from === from && last.stop === from.start[step]) last.stop = from.start[step + 1];
      else pieces.push({ from, start: from.start[step], stop: from.start[step + 1] });
    }
    const joined = Object.create(Hits.prototype);
    for (const name of ["head", "mass", "source", "step"]) {
      const array = new this[name].constructor(pieces.reduce((sum, piece) => sum + piece.stop - piece.start, 0));
      let at = 0;
      for (const { from, start, stop } of pieces) {
        array.set(from[name].subarray(start, stop), at);
        at += stop - start;
      }
      joined[name] = array;
    }
    joined.start = new Uint32Array(steps + 1);
    for (const step of joined.step) joined.start[step + 1]++;
    for (let step = 0; step < steps; step++) joined.start[step + 1] += joined.start[step];
    joined.reversed = null;
    return joined;
  }

  /** Attention of a hit, 0 to 1. */
  share(hit) {
    return this.mass[hit] / 255;
  }

  /** Hits by source: those on `source` are order[start[source]] to order[start[source + 1] - 1]. */
  bySource() {
    if (!this.reversed) {
      const start = new Uint32Array(this.start.length);
      for (const source of this.source) start[source + 1]++;
      for (let index = 1; index < start.length; index++) start[index] += start[index - 1];
      const next = start.slice();
      const order = new Uint32Array(this.source.length);
      for (let hit = 0; hit < this.source.length; hit++) order[next[this.source[hit]]++] = hit;
      this.reversed = { start, order };
    }
    return this.reversed;
  }
}

/** One trace of the page. */
export class TraceData {
  constructor(plain, buffer) {
    this.plain = plain;
    this.pack = new Pack(plain.manifest, buffer);
    this.length = plain.trace.length;
    this.text = this.pack.array("text");
    this.phase = this.pack.array("phase");
    this.sentence = this.pack.array("sentence");
    this.sentences = sentenceStarts(this.sentence);
    this.recorded = new Hits(this.pack, "recorded");
    this.full = this.pack.has("full.count") ? new Hits(this.pack, "full").filledFrom(this.recorded) : null;
    this.heads = plain.heads;
    // For each query head the step after which each position was gone, plus one; null where nothing is evicted.
    this.gone = this.heads.map(({ layer, kv }) => {
      const name = `evicted.${layer}.${kv}`;
      return this.pack.has(name) ? this.pack.array(name) : null;
    });
    this.headByName = new Map(this.heads.map((head) => [head.name, head]));
    this.score = new Float64Array(this.length);
    this.revisitAt = new Map();
    for (const row of plain.revisits) {
      this.score[row.position] = row.score;
      this.revisitAt.set(row.position, row);
    }
    this.revisitPositions = [...this.revisitAt.keys()].sort((a, b) => a - b);
    this.targetsAt = groupBy(plain.targets, (row) => row.position);
    this.lostAt = new Map(plain.lost.map((row) => [row.position, row]));
    this.truthAt = new Map((plain.truth ?? []).map((row) => [row.position, row]));
  }

  /** Text of one token. */
  token(position) {
    return this.plain.dictionary[this.text[position]] ?? "";
  }

  /** Text from `start` to before `stop` on one line, cut at `most` characters. */
  snippet(start, stop, most = 80) {
    let text = "";
    for (let position = start; position < stop && text.length <= most + 20; position++) text += this.token(position);
    const line = text.replace(/\s+/g, " ").trim();
    if (!line) return text.includes("\n") ? "↵" : "(blank)";
    return line.length > most ? `${[...line].slice(0, most).join("").trimEnd()} …` : line;
  }

  sentenceRange(number) {
    return [this.sentences[number], this.sentences[number + 1] ?? this.length];
  }

  /** The step after which a position was gone from a head's cache, or null. */
  evictedAt(head, position) {
    const at = this.pack.array(`evicted.${head.layer}.${head.kv}`)[position];
    return at ? at - 1 : null;
  }

  /** Whether a query head had lost a position before a step. */
  wasGone(head, position, step) {
    const at = this.gone[head]?.[position];
    return at > 0 && at <= step;
  }

  get evicts() {
    return this.gone.some(Boolean);
  }

  hits(over) {
    return over === "full" && this.full ? this.full : this.recorded;
  }
}

export function sentenceStarts(sentence) {
  const starts = [];
  for (let position = 0; position < sentence.length; position++) {
    if (position === 0 || sentence[position] !== sentence[position - 1]) starts.push(position);
  }
  return starts;
}

export function groupBy(rows, key) {
  const groups = new Map();
  for (const row of rows) {
    const name = key(row);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  return groups;
}
