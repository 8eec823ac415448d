import assert from "node:assert/strict";
import { test } from "node:test";
import { gzipSync } from "node:zlib";

import { sayCausal } from "../../../beaconscope/report/assets/answers.js";
import { beaconChanges, changeAt, lifespans } from "../../../beaconscope/report/assets/beaconing.js";
import { bytesOfBase64, inflate, Pack } from "../../../beaconscope/report/assets/data.js";
import { binned, breakRows, findText, rowOf, visibleRows } from "../../../beaconscope/report/assets/layout.js";
import { binByMax, lookersAt, mergeSpans, sourcesOf } from "../../../beaconscope/report/assets/looking.js";
import { commonPrefix, rankCorrelation } from "../../../beaconscope/report/assets/comparing.js";
import { curvesOf, sayBounds } from "../../../beaconscope/report/assets/series.js";
import { neighbour } from "../../../beaconscope/report/assets/keys.js";
import { firstState, formatHash, parseHash, Store, traceOfHash } from "../../../beaconscope/report/assets/state.js";
import { made, packed } from "./made.js";

test("what was compressed comes back", async () => {
  const raw = new Uint8Array([1, 2, 3, 250]);
  const text = gzipSync(raw).toString("base64");
  assert.deepEqual(new Uint8Array(await inflate(bytesOfBase64(text))), raw);
});

test("what is missing is NaN, never zero", () => {
  const { manifest, buffer } = packed({ x: ["uint8", [0, 254, 255], { low: 1, step: 0.5 }], y: ["uint16", [65535], { low: 0, step: 1 }] });
  const pack = new Pack(manifest, buffer);
  assert.deepEqual([...pack.numbers("x")], [1, 128, NaN]);
  assert.ok(Number.isNaN(pack.numbers("y")[0]));
  assert.equal(pack.array("absent").length, 0);
});

test("hits of a step, of one head and pooled", () => {
  const data = made();
  assert.deepEqual(sourcesOf(data, data.recorded, 4, 0), [{ position: 1, mass: 200 / 255, evicted: 200 / 255 }]);
  const pooled = sourcesOf(data, data.recorded, 4, null);
  assert.deepEqual(pooled.map((source) => source.position), [1, 3]);
  assert.ok(Math.abs(pooled[0].mass - 300 / 255 / 2) < 1e-12);
  assert.equal(pooled[1].evicted, 0);
});

test("an entry is evicted from the step after the compression on", () => {
  const data = made();
  assert.equal(data.evictedAt(data.heads[0], 1), 3);
  assert.equal(data.evictedAt(data.heads[0], 0), null);
  assert.equal(sourcesOf(data, data.recorded, 2, 0)[0].evicted, 0);
});

test("who looks at a span, without the span itself", () => {
  const data = made();
  assert.deepEqual(lookersAt(data, data.recorded, 1, 2, 0).map((each) => each.position), [4, 2, 5]);
  assert.deepEqual(lookersAt(data, data.recorded, 0, 3, null).map((each) => each.position), [4, 5]);
});

test("steps without full attention show what was recorded", () => {
  const data = made({ full: true });
  assert.deepEqual(sourcesOf(data, data.full, 5, null).map((each) => each.position), [1]);
  assert.deepEqual(sourcesOf(data, data.full, 4, 0).map((each) => each.position), [1]);
  assert.equal(data.full.length, data.recorded.length - 1);
});

test("positions close together make one span", () => {
  const spans = mergeSpans([4, 6, 20].map((position) => ({ position, mass: 0.1, evicted: 0 })));
  assert.deepEqual(spans.map(({ start, stop }) => [start, stop]), [[4, 7], [20, 21]]);
});

test("the map keeps the largest hit of each cell", () => {
  const data = made();
  const { most } = binByMax(data, data.recorded, null, [0, 6], [0, 6], 6, 6);
  assert.equal(most[4 * 6 + 1], 200);
  assert.equal(most[3 * 6 + 1], 0);
  assert.deepEqual([...binByMax(data, data.recorded, null, [0, 6], [0, 6], 1, 1).most], [255]);
  assert.deepEqual([...binByMax(data, data.recorded, 1, [2, 6], [2, 6], 1, 1).most], [50]);
});

test("a hash says the selection, and nonsense in it is passed over", () => {
  const data = made();
  const state = firstState(data);
  assert.equal(state.token, 4);
  const chosen = { ...state, token: 2, sentence: 0, head: 1, pooled: false, beacon: "q3", zoom: [1, 5] };
  assert.deepEqual(parseHash(formatHash(chosen, data), state, data), chosen);
  assert.deepEqual(parseHash("#t=99&s=-1&l=0&h=%3Cscript%3E&b=q&z=5-1&o=x", state, data), { ...state, beacon: null });
  assert.equal(parseHash("#s=1", state, data).token, 3);
  assert.equal(traceOfHash("#trace=1", 2), 1);
  assert.equal(traceOfHash("#trace=7", 2), 0);
});

test("the store tells only those who asked, once for many changes", () => {
  const data = made();
  const runs = [];
  const store = new Store(data, 0, (run) => runs.push(run));
  const told = [];
  store.listen(["token"], (state) => told.push(state.token));
  store.listen(["beacon"], () => told.push("beacon"));
  store.set({ token: 1 });
  store.set({ token: 3 });
  assert.equal(runs.length, 1);
  runs[0]();
  assert.deepEqual(told, [3]);
  assert.equal(store.state.sentence, 1);
});

test("rows break where a token does not fit, and after a line end", () => {
  assert.deepEqual([...breakRows([4, 4, 4, 30, 4], [0, 0, 0, 0, 0], 10)], [0, 2, 3, 4]);
  assert.deepEqual([...breakRows([4, 4, 4], [1, 0, 0], 10)], [0, 1]);
  assert.deepEqual([...breakRows([], [], 10)], []);
  assert.equal(rowOf([0, 2, 3], 2), 1);
  assert.equal(rowOf([0, 2, 3], 99), 2);
  assert.deepEqual(visibleRows(270, 270, 27, 100, 2), [8, 22]);
});

test("bins without any value stay missing", () => {
  assert.deepEqual([...binned([1, 2, NaN, NaN], 2, "sum")], [3, NaN]);
  assert.deepEqual([...binned([1, 3, 5, 9], 2, "mean")], [2, 7]);
});

test("bins are of as many values each, but for the last", () => {
  for (const length of [300, 360, 479, 5000]) {
    const per = Math.ceil(length / 320);
    const ones = binned(new Float64Array(length).fill(1), per, "sum");
    assert.deepEqual(new Set(ones.slice(0, -1)), new Set([per]));
    assert.equal(ones.reduce((sum, value) => sum + value), length);
    assert.equal(ones.length, Math.ceil(length / per));
  }
  assert.deepEqual([...binned([1, 3, 5], 2, "mean")], [2, 5]);
});

test("text is found over token borders, whatever the case", () => {
  assert.deepEqual(findText(["the ca", "t sat", ". CAT"], "cat"), [0, 2]);
  assert.deepEqual(findText(["a"], ""), []);
});

test("beacons: what is in force, and how long each lives", () => {
  const { manifest, buffer } = packed({
    "beacons.0.step": ["uint32", [10, 20, 30]],
    "beacons.0.count": ["uint16", [2, 2, 2]],
    "beacons.0.source": ["uint8", [4, 8, 4, 16, 16, 0]],
    "beacons.0.members": ["uint8", [0, 0, 5, 6, 7, 8]],
  });
  const changes = beaconChanges(new Pack(manifest, buffer), 0);
  assert.deepEqual(changes.map((change) => change.beacons.map((beacon) => beacon.source)), [[3, 7], [3, 15], [15, -1]]);
  // A change counts from the next position on.
  assert.deepEqual([10, 11, 20, 21, 99].map((step) => changeAt(changes, step)), [-1, 0, 0, 1, 2]);
  const lives = lifespans(changes, 40).map(({ key, birth, death, members }) => [key, birth, death, members]);
  assert.deepEqual(lives, [["q3", 10, 30, 12], ["q7", 10, 20, 6], ["q15", 20, null, 8], ["c1", 30, null, 0]]);
});

test("next and previous revisit go around", () => {
  assert.equal(neighbour([3, 8], 3, 1), 8);
  assert.equal(neighbour([3, 8], 8, 1), 3);
  assert.equal(neighbour([3, 8], 3, -1), 8);
  assert.equal(neighbour([], 3, 1), null);
});

test("two traces: common text, and rank correlation with ties", () => {
  assert.equal(commonPrefix(made(), made()), 6);
  assert.equal(rankCorrelation([1, 2, 3], [10, 20, 30]), 1);
  assert.equal(rankCorrelation([1, 2, 3], [3, 2, 1]), -1);
  assert.ok(Number.isNaN(rankCorrelation([1], [2])));
});

test("what bounds the curves is said as it is drawn", () => {
  const rows = (policies, budgets) => policies.flatMap((policy) => budgets.map((budget) => ({ policy, kv_bytes: budget, mass: 0.5, params: { budget } })));
  const said = (policies, budgets) => sayBounds(curvesOf(rows(policies, budgets), "mass"));
  assert.match(said(["beacon", "random", "oracle"], [16, 32]), /▵ the oracle.*▿ random.*The band lies between the two\.$/);
  assert.match(said(["beacon", "random", "oracle"], [16]), /One budget, so there are points and no curves\.$/);
  assert.doesNotMatch(said(["beacon", "random"], [16, 32]), /band|oracle|points/);
  assert.equal(said(["beacon"], [16, 32]), "");
});

test("precision and recall of nothing are unknown", () => {
  const said = sayCausal({ revisits: 0, both: 0, threshold: 1, precision: null, recall: [0.5, 0.4, 0.6] });
  assert.match(said, /precision unknown, recall 50 % \(40 % to 60 %\)/);
});
