// Small helpers.  All text of a run goes into the page as text nodes: nothing here ever parses it as HTML.
const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; a null child is left out. */
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  return filled(node, attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// Control characters, and those that turn the direction of text or have no width, are shown by number.
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000d\u000e-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

/** Text as nodes, with what cannot be seen made visible. */
function visible(text) {
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > from) nodes.push(text.slice(from, match.index));
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(el("span", { class: "control", title: "a character that cannot be seen" }, `U+${code}`));
    from = match.index + match[0].length;
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

/** The same as one text, for where there can be no nodes. */
function legible(text) {
  return text.replace(HIDDEN, (character) => `[U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}]`);
}

/** A number for people: 0.00123, 12.3, 4,560, 1.2e-7. */
function pretty(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e9) return value.toExponential(Math.max(0, digits - 2));
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: size >= 1e4 ? 0 : 1 });
  return String(Number(value.toPrecision(digits)));
}

function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${pretty(seconds, 3)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function clock(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const date = new Date(1000 * seconds);
  return Number.isNaN(date.getTime()) ? "–" : `${date.toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

/** A table in a box that scrolls by itself; cells are text, nodes, or {text, number, wrap, head}. */
function table(caption, heads, rows, tall = false) {
  const cell = (value, tag) => {
    const it = value !== null && typeof value === "object" && !(value instanceof Node) ? value : { text: value };
    const content = it.text instanceof Node ? it.text : visible(String(it.text ?? "–"));
    const name = it.head ? "th" : tag;
    const scope = name === "th" ? (it.head ? "row" : "col") : null;
    return el(name, { scope, class: it.number ? "number" : it.wrap ? "text" : null }, content);
  };
  const body = rows.map((row) => el("tr", {}, row.map((value) => cell(value, "td"))));
  const head = el("thead", {}, el("tr", {}, heads.map((value) => cell(value, "th"))));
  const grid = el("table", {}, el("caption", {}, visible(caption)), head, el("tbody", {}, body));
  return el("div", { class: tall ? "scroll tall" : "scroll", tabindex: 0, role: "region", "aria-label": legible(caption) }, grid);
}

const numeric = (text) => ({ text, number: true });

/** Puts new options into a select and keeps the choice where it is still there. */
function options(select, entries) {
  const wanted = JSON.stringify(entries);
  if (select.dataset.entries === wanted) return;
  const chosen = select.value;
  select.replaceChildren(...entries.map(([value, text]) => el("option", { value }, legible(text))));
  if (entries.some(([value]) => String(value) === chosen)) select.value = chosen;
  select.dataset.entries = wanted;
}
