// The part of a 2D canvas context that the charts use, writing SVG. So one drawing serves screen, PNG and SVG.

const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

export function escapeXml(text) {
  return (
    String(text)
      .replace(/[&<>"']/g, (letter) => escapes[letter])
      // eslint-disable-next-line no-control-regex -- XML 1.0 has no way to write them
      .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd")
  );
}

export class SvgContext {
  constructor(width, height) {
    this.width = width;
    this.height = height;
    this.parts = [];
    this.path = "";
    this.stack = [];
    this.clips = 0;
    Object.assign(this, {
      fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, globalAlpha: 1, font: "12px sans-serif",
      textAlign: "left", textBaseline: "alphabetic", lineCap: "butt", lineJoin: "miter",
    });
    this.dash = [];
    this.clipId = null;
  }

  save() {
    const { fillStyle, strokeStyle, lineWidth, globalAlpha, font, textAlign, textBaseline, lineCap, dash, clipId } = this;
    this.stack.push({
      fillStyle, strokeStyle, lineWidth, globalAlpha, font, textAlign, textBaseline, lineCap, dash, clipId,
    });
  }

  restore() {
    Object.assign(this, this.stack.pop() ?? {});
  }

  setLineDash(dash) {
    this.dash = dash;
  }

  beginPath() {
    this.path = "";
  }

  moveTo(x, y) {
    this.path += `M${short(x)} ${short(y)}`;
  }

  lineTo(x, y) {
    this.path += `${this.path ? "L" : "M"}${short(x)} ${short(y)}`;
  }

  bezierCurveTo(a, b, c, d, x, y) {
    this.path += `C${[a, b, c, d, x, y].map(short).join(" ")}`;
  }

  closePath() {
    this.path += "Z";
  }

  rect(x, y, width, height) {
    this.path += `M${short(x)} ${short(y)}h${short(width)}v${short(height)}h${short(-width)}Z`;
  }

  /** Whole circles only. */
  arc(x, y, radius) {
    const r = short(radius);
    this.path += `M${short(x - radius)} ${short(y)}a${r} ${r} 0 1 0 ${short(2 * radius)} 0a${r} ${r} 0 1 0 ${short(-2 * radius)} 0Z`;
  }

  fill() {
    this.put(`<path d="${this.path}" fill="${escapeXml(this.fillStyle)}"`);
  }

  stroke() {
    this.put(`<path d="${this.path}" fill="none" ${this.lines()}`);
  }

  fillRect(x, y, width, height) {
    this.put(`<rect ${box(x, y, width, height)} fill="${escapeXml(this.fillStyle)}"`);
  }

  strokeRect(x, y, width, height) {
    this.put(`<rect ${box(x, y, width, height)} fill="none" ${this.lines()}`);
  }

  clearRect() {}

  clip() {
    this.clipId = `clip${++this.clips}`;
    this.parts.push(`<clipPath id="${this.clipId}"><path d="${this.path}"/></clipPath>`);
  }

  fillText(text, x, y) {
    const anchor = { left: "start", start: "start", center: "middle", right: "end", end: "end" }[this.textAlign];
    const line = { middle: "central", top: "hanging", bottom: "text-after-edge" }[this.textBaseline] ?? "auto";
    this.put(
      `<text x="${short(x)}" y="${short(y)}" text-anchor="${anchor}" dominant-baseline="${line}" ` +
        `style="font:${escapeXml(this.font)}" fill="${escapeXml(this.fillStyle)}"`,
      `>${escapeXml(text)}</text>`,
    );
  }

  measureText(text) {
    return { width: text.length * 6.2 };
  }

  lines() {
    const dash = this.dash.length ? ` stroke-dasharray="${this.dash.join(" ")}"` : "";
    return `stroke="${escapeXml(this.strokeStyle)}" stroke-width="${short(this.lineWidth)}" stroke-linecap="${this.lineCap}"${dash}`;
  }

  put(start, end = "/>") {
    const alpha = this.globalAlpha < 1 ? ` opacity="${short(this.globalAlpha)}"` : "";
    const clip = this.clipId ? ` clip-path="url(#${this.clipId})"` : "";
    this.parts.push(`${start}${alpha}${clip}${end}`);
  }

  /** The whole picture on a ground. */
  toString(ground = "#fff") {
    return (
      `<svg xmlns="http://www.w3.org/2000/svg" width="${this.width}" height="${this.height}" ` +
      `viewBox="0 0 ${this.width} ${this.height}"><rect width="100%" height="100%" fill="${escapeXml(ground)}"/>` +
      `${this.parts.join("")}</svg>`
    );
  }
}

function short(value) {
  return Number(value.toFixed(2));
}

function box(x, y, width, height) {
  return `x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}"`;
}
