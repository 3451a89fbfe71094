// How numbers are written, and how elements are made.

const LARGE = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** A number with about `digits` significant digits, and a letter for thousands and more. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "not finite";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15 || size < 1e-3) {
    return value.toExponential(Math.max(digits - 2, 1)).replace(/\.?0*e\+?/, "e");
  }
  for (const [unit, letter] of LARGE) {
    if (size >= unit && size >= 1e4) return trimmed(value / unit, digits) + letter;
  }
  return trimmed(value, digits);
}

function trimmed(value, digits) {
  const text = value.toPrecision(digits);
  return text.includes("e") ? String(Number(text)) : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** A whole number, with its thousands apart. */
export function whole(value) {
  return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

export function percent(value) {
  return Number.isNaN(value) ? "not finite" : `${trimmed(100 * value, 3)}%`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${trimmed(value, 4)} ${units[at]}`;
}

/** A duration in seconds: "2 h 05 min". */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "";
  if (seconds < 60) return `${trimmed(seconds, 3)} s`;
  const two = (value) => String(Math.floor(value)).padStart(2, "0");
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${two(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${two((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${two((seconds % 86400) / 3600)} h`;
}

/** An element with properties, attributes (names with a `-`, and `role`) and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "scope") element.setAttribute(name, value);
    else if (name === "style") Object.assign(element.style, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A table with a head. Cells are texts, elements, or `{ number: text }`. */
export function table(heads, rows, label) {
  const cell = (tag, content) => {
    const isNumber = content !== null && typeof content === "object" && "number" in content;
    const inner = isNumber ? content.number : content;
    return make(tag, { className: isNumber ? "number" : "text" }, inner);
  };
  const head = (content) => {
    const th = cell("th", content);
    th.scope = "col";
    return th;
  };
  const row = ({ cells, className = "" }) => make("tr", { className }, ...cells.map((c) => cell("td", c)));
  return make("div", { className: "scroll" }, make("table", { className: "data", "aria-label": label },
    make("thead", {}, make("tr", {}, ...heads.map(head))), make("tbody", {}, ...rows.map(row))));
}

export function byId(id) {
  return document.getElementById(id);
}
