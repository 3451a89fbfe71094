// What the mouse, a finger and the keyboard do in a chart.

import { HORIZONTAL } from "./axes.js";
import { byId, make } from "./text.js";

/** A drag that is shorter than this is a click, in pixels. */
const SHORTEST = 6;

export function listen(chart) {
  const { plot, view } = chart;
  let begin = null;
  const at = (event) => event.clientX - plot.getBoundingClientRect().left;

  plot.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    begin = at(event);
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    if (!chart.horizontal) return;
    if (begin !== null && Math.abs(at(event) - begin) >= SHORTEST) chart.selected = [begin, at(event)];
    view.setCursor(chart.horizontal.value(at(event)));
    showTooltip(chart, event.clientX, event.clientY);
  });
  plot.addEventListener("pointerup", (event) => {
    const [from, to] = [begin, at(event)];
    begin = null;
    chart.selected = null;
    if (from !== null && Math.abs(to - from) >= SHORTEST) {
      view.setZoom([from, to].map((x) => chart.horizontal.value(x)).sort((a, b) => a - b));
    }
  });
  plot.addEventListener("pointercancel", () => {
    begin = null;
    chart.selected = null;
  });
  plot.addEventListener("pointerleave", () => {
    if (begin === null) {
      view.setCursor(null);
      hideTooltip();
    }
  });
  plot.addEventListener("dblclick", () => view.setZoom(null));
  plot.addEventListener("keydown", (event) => {
    if (chart.horizontal && !event.ctrlKey && !event.metaKey && !event.altKey && press(chart, event.key, event.shiftKey)) {
      event.preventDefault();
    }
  });
  plot.addEventListener("blur", () => {
    view.setCursor(null);
    hideTooltip();
  });
}

/** Does what a key says; false for other keys. */
function press(chart, key, isFast) {
  const { view } = chart;
  const [first, last] = chart.range();
  const points = chart.lines[0]?.points;
  const cursor = view.cursor ?? last;
  const move = (by) => {
    if (!points) return;
    const place = Math.min(Math.max(points.nearest(view.x, cursor) + by, 0), points.length - 1);
    goTo(chart, view.cursor === null ? points[view.x][points.nearest(view.x, last)] : points[view.x][place]);
  };
  const zoom = (factor) => {
    const [low, high] = [cursor - (cursor - first) * factor, cursor + (last - cursor) * factor];
    const [from, to] = view.fullRange();
    view.setZoom(low <= from && high >= to ? null : [Math.max(low, from), Math.min(high, to)]);
  };
  switch (key) {
    case "ArrowLeft": move(isFast ? -10 : -1); break;
    case "ArrowRight": move(isFast ? 10 : 1); break;
    case "Home": goTo(chart, first); break;
    case "End": goTo(chart, last); break;
    case "+": case "=": zoom(0.5); break;
    case "-": zoom(2); break;
    case "0": view.setZoom(null); break;
    case "l": view.switchLog(chart.kind.id); break;
    case "Escape": view.setCursor(null); hideTooltip(); break;
    default: return false;
  }
  return true;
}

/** Moves the cursor by the keyboard, and says what is there. */
function goTo(chart, at) {
  const { view, plot } = chart;
  view.setCursor(at);
  const box = plot.getBoundingClientRect();
  showTooltip(chart, box.left + chart.horizontal.pixel(at), box.top + 20);
  const { name, write } = HORIZONTAL[view.x];
  const values = rows(chart).map(({ line, value }) => `${line.run.name} ${line.label} ${chart.kind.write(value)}`);
  byId("spoken").textContent = `${name} ${write(at)}: ${values.join("; ")}`;
}

/** The value of each line at the cursor. */
function rows(chart) {
  const { view } = chart;
  return chart.lines.flatMap((line) => {
    const { points } = line;
    const place = points.nearest(view.x, view.cursor);
    const isFar = view.cursor < points[view.x][0] - farOf(chart) || view.cursor > points[view.x][points.length - 1] + farOf(chart);
    if (place < 0 || isFar) return [];
    return [{ line, place, value: points.value[place], smooth: line.values[place] }];
  });
}

/** A line that ends this far from the cursor has no value there. */
function farOf(chart) {
  return Math.abs(chart.horizontal.value(12) - chart.horizontal.value(0));
}

function showTooltip(chart, x, y) {
  const { view, kind } = chart;
  const found = rows(chart);
  const { name, write } = HORIZONTAL[view.x];
  const severalNames = chart.names.length > 1;
  const lines = found.slice(0, 24).map(({ line, value, smooth, place }) => {
    const isSmoothed = line.values !== line.points.value;
    const step = line.points.step[place];
    return make("tr", {},
      make("td", {}, make("span", { className: "swatch", style: { background: line.colour } })),
      make("td", {}, severalNames ? `${line.run.name}: ${line.label}` : line.run.name),
      make("td", { className: "number" }, kind.write(value)),
      make("td", { className: "number note" }, isSmoothed ? `mean ${kind.write(smooth)}` : ""),
      make("td", { className: "number note" }, view.x === "step" && !line.isSparse ? "" : `step ${step}`));
  });
  const near = Math.abs(chart.horizontal.value(5) - chart.horizontal.value(0));
  const events = view.marks ? view.shownRuns().flatMap((run) =>
    run.events.filter((event) => Math.abs(event[view.x] - view.cursor) <= near)
      .map((event) => `${run.name}: ${event.kind}, ${event.text}`)) : [];
  const notes = events.slice(0, 4).map((text) => make("div", { className: "note" }, text));
  const tooltip = byId("tooltip");
  const places = found.map(({ line, place }) => line.points[view.x][place]);
  const shown = places.length === 1 ? places[0] : view.cursor;
  tooltip.replaceChildren(make("strong", {}, `${name} ${write(shown)}`), make("table", {}, make("tbody", {}, ...lines)), ...notes);
  tooltip.hidden = found.length === 0 && events.length === 0;
  const box = tooltip.getBoundingClientRect();
  const left = x + 16 + box.width > window.innerWidth ? x - box.width - 16 : x + 16;
  tooltip.style.left = `${Math.max(left, 4)}px`;
  tooltip.style.top = `${Math.max(Math.min(y + 14, window.innerHeight - box.height - 4), 4)}px`;
}

function hideTooltip() {
  byId("tooltip").hidden = true;
}
