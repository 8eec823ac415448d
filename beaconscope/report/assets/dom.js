// Making elements. Text of a trace only ever becomes the text of a node.

const SVG_NAMES = new Set(["svg", "path", "circle"]);

/** An element with properties and children; strings become text. */
export function el(name, properties = {}, ...children) {
  const element = SVG_NAMES.has(name)
    ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.setAttribute("class", value);
    else if (key in element && typeof value !== "string") element[key] = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

/** A group of buttons of which one is pressed. */
export function choices(label, options, chosen, choose) {
  const buttons = options.map(([value, text, title]) =>
    el("button", {
      type: "button", "data-value": String(value), title, "aria-pressed": String(value === chosen),
      onclick: () => {
        mark(value);
        choose(value);
      },
    }, text),
  );
  function mark(value) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === String(value)));
  }
  const group = el("div", { class: "segmented", role: "group", "aria-label": label }, buttons);
  group.mark = mark;
  return group;
}

/** A drop-down list. */
export function picker(label, options, chosen, choose) {
  const select = el(
    "select",
    { "aria-label": label, onchange: (event) => choose(event.target.value) },
    options.map(([value, text]) => el("option", { value: String(value) }, text)),
  );
  select.value = String(chosen);
  return select;
}

/** Show lines beside the pointer; nothing to hide it. */
export function tip(lines, event) {
  const box = byId("tip");
  if (!lines || !lines.length) {
    box.hidden = true;
    return;
  }
  box.replaceChildren(...lines.map((line, index) => el("div", { class: index ? "" : "first" }, line)));
  box.hidden = false;
  const { clientWidth: width, clientHeight: height } = box;
  const x = Math.min(event.clientX + 14, innerWidth - width - 8);
  const y = event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18;
  box.style.transform = `translate(${Math.max(4, x)}px, ${Math.max(4, y)}px)`;
}

/** Let the browser save something under a name. */
export function saveAs(name, blob) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A plain table of rows; at most `most` of them, and a line that says so. */
export function plainTable(columns, rows, most = 200) {
  const shown = rows.slice(0, most);
  const table = el(
    "table",
    { class: "data" },
    el("thead", {}, el("tr", {}, columns.map((column) => el("th", { scope: "col" }, column.name)))),
    el("tbody", {}, shown.map((row) =>
      el("tr", {}, columns.map((column) => {
        const value = row[column.key];
        const text = value === null || value === undefined || Number.isNaN(value) ? "–"
          : typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value);
        return el("td", { class: typeof value === "number" ? "number" : "" }, text);
      })),
    )),
  );
  const note = rows.length > most ? el("p", { class: "caption" }, `The first ${most} of ${rows.length} rows; the CSV has all.`) : null;
  return el("div", { class: "table-wrap", tabindex: "0" }, table, note);
}
