// A trace by hand: six tokens in two sentences, two query heads on one KV head, position 1 evicted at step 3.

import { TraceData } from "../../../beaconscope/report/assets/data.js";

const KINDS = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array };

export function packed(arrays) {
  const manifest = {};
  let at = 0;
  const parts = [];
  for (const [name, [type, values, how]] of Object.entries(arrays)) {
    const array = KINDS[type].from(values);
    manifest[name] = { type, shape: [array.length], at, ...how };
    parts.push([at, new Uint8Array(array.buffer)]);
    at += Math.ceil(array.byteLength / 8) * 8;
  }
  const buffer = new ArrayBuffer(at);
  for (const [start, bytes] of parts) new Uint8Array(buffer).set(bytes, start);
  return { manifest, buffer };
}

// [step, head, source, mass of 255]
export const HITS = [
  [1, 0, 0, 255], [2, 0, 1, 128], [2, 1, 0, 64], [4, 0, 1, 200], [4, 1, 1, 100], [4, 1, 3, 50], [5, 0, 1, 30], [5, 1, 4, 10],
];

export function made({ full = false } = {}) {
  const counts = [0, 1, 2, 0, 3, 2];
  const hits = (name, rows, number) => ({
    [`${name}.count`]: ["uint16", number],
    [`${name}.head`]: ["uint8", rows.map((row) => row[1])],
    [`${name}.back`]: ["uint8", rows.map((row) => row[0] - row[2])],
    [`${name}.mass`]: ["uint8", rows.map((row) => row[3])],
  });
  const nothing = ["uint8", [255, 255, 255, 0, 127, 254], { low: 0, step: 1 / 254 }];
  const { manifest, buffer } = packed({
    text: ["uint8", [0, 1, 2, 0, 1, 2]],
    phase: ["uint8", [0, 0, 1, 1, 1, 2]],
    sentence: ["uint32", [0, 0, 0, 1, 1, 1]],
    lost_share: nothing,
    "evicted.0.0": ["uint8", [0, 4, 0, 0, 0, 0]],
    ...hits("recorded", HITS, counts),
    ...(full ? hits("full", [[5, 0, 1, 90]], [0, 0, 0, 0, 0, 1]) : {}),
  });
  const head = (number) => ({ number, name: `0.0.${number}`, layer: 0, kv: 0, group: number, rank: number, analyzed: true });
  return new TraceData({
    manifest,
    dictionary: ["a", " b", " c."],
    trace: { length: 6, prompt_length: 2, hits: 3 },
    summary: { window: 2, sinks: [] },
    heads: [head(0), head(1)],
    kv_heads: [{ layer: 0, kv: 0, compressions: [3] }],
    revisits: [{ position: 4, score: 1.5, heads: ["0.0.0"], target_start: 1, target_stop: 2 }],
    targets: [], lost: [], anchors: [], truth: null,
  }, buffer);
}
