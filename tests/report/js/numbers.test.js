import assert from "node:assert/strict";
import { test } from "node:test";

import { apart, cividis, inkOn, withAlpha } from "../../../beaconscope/report/assets/colour.js";
import { bytes, linear, percent, ticks } from "../../../beaconscope/report/assets/numbers.js";
import { escapeXml, SvgContext } from "../../../beaconscope/report/assets/svg.js";
import { filterRows, sortRows, toCsv } from "../../../beaconscope/report/assets/tables.js";

test("a scale maps its ends, and an empty domain to its start", () => {
  const scale = linear([10, 20], [0, 100]);
  assert.deepEqual([scale(10), scale(15), scale(20)], [0, 50, 100]);
  assert.equal(linear([3, 3], [0, 100])(3), 0);
});

test("ticks are round and within the range", () => {
  assert.deepEqual(ticks(0, 100, 5), [0, 20, 40, 60, 80, 100]);
  assert.deepEqual(ticks(0, 0.3, 3), [0, 0.1, 0.2, 0.3]);
  assert.deepEqual(ticks(4, 4), [4]);
});

test("numbers that are not known are a dash, small ones are not zero", () => {
  assert.equal(percent(null), "–");
  assert.equal(percent(NaN), "–");
  assert.equal(percent(0.0001), "<1 %");
  assert.equal(percent(0), "0 %");
  assert.equal(bytes(1_500_000), "1.50 MB");
});

test("cividis goes from dark blue to yellow, and ink can be read on both", () => {
  assert.deepEqual(cividis(0), [0, 34, 78]);
  assert.deepEqual(cividis(1), [254, 232, 56]);
  assert.equal(inkOn(cividis(0)), "#fff");
  assert.equal(inkOn(cividis(1)), "#111");
  assert.equal(withAlpha("#0072b2", 0.5), "rgba(0,114,178,0.5)");
});

test("amounts can be told from a white and from a black ground, and from each other", () => {
  // Contrast as WCAG 2.1 defines it; 3 is what it asks of graphics.
  const luminance = (rgb) => rgb.map((value) => value / 255).map((share) => (share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4))
    .reduce((sum, share, index) => sum + share * [0.2126, 0.7152, 0.0722][index], 0);
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  for (const [dark, ground] of [[false, [255, 255, 255]], [true, [0x17, 0x19, 0x1c]]]) {
    for (let share = 0; share <= 1; share += 0.05) assert.ok(contrast(apart(share, dark), ground) >= 3, `${dark} ${share}`);
    assert.ok(contrast(apart(0, dark), apart(1, dark)) > 3);
  }
});

test("missing values sort last in either direction", () => {
  const rows = [{ a: 2 }, { a: null }, { a: 10 }, { a: NaN }];
  assert.deepEqual(sortRows(rows, "a", false).map((row) => row.a), [2, 10, null, NaN]);
  assert.deepEqual(sortRows(rows, "a", true).map((row) => row.a), [10, 2, null, NaN]);
});

test("a filter wants every word, in any column", () => {
  const rows = [{ a: "step two", b: 7 }, { a: "step", b: 8 }];
  assert.deepEqual(filterRows(rows, "STEP 7"), [rows[0]]);
  assert.equal(filterRows(rows, " ").length, 2);
});

test("CSV quotes what it must and defuses formulas", () => {
  const columns = [{ key: "t", name: "text" }, { key: "n", name: "number" }];
  const csv = toCsv(columns, [{ t: 'a "b", c\nd', n: -1.5 }, { t: "=cmd()", n: null }]);
  assert.equal(csv, 'text,number\r\n"a ""b"", c\nd",-1.5\r\n\'=cmd(),\r\n');
});

test("SVG text is escaped, controls are replaced", () => {
  assert.equal(escapeXml('<a href="x">&\u0001</a>'), "&lt;a href=&quot;x&quot;&gt;&amp;\ufffd&lt;/a&gt;");
  const context = new SvgContext(100, 50);
  context.fillText("</svg><script>alert(1)</script>", 1, 2);
  assert.ok(!context.toString().includes("<script"));
});

test("an SVG context draws boxes, paths and clips", () => {
  const context = new SvgContext(100, 50);
  context.save();
  context.beginPath();
  context.rect(0, 0, 10, 10);
  context.clip();
  context.fillStyle = "#123456";
  context.fillRect(1, 2, 3, 4);
  context.restore();
  context.fillRect(5, 6, 7, 8);
  const text = context.toString();
  assert.match(text, /<rect x="1" y="2" width="3" height="4" fill="#123456" clip-path="url\(#clip1\)"\/>/);
  assert.match(text, /<rect x="5" y="6" width="7" height="8" fill="#000"\/>/);
});
