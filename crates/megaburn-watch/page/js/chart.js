// A chart: lines of some measurements of all runs that are shown.

import { Axis, HORIZONTAL, rangeOf } from "./axes.js";
import { listen } from "./pointer.js";
import { make } from "./text.js";

const LEFT = 62;
const RIGHT = 12;
const TOP = 8;
const BOTTOM = 24;

/** Dashes of the first, second, .. measurement of a chart. */
export const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];

const BAD_EVENTS = ["skipped", "not finite", "spike"];

export class Chart {
  /** `kind` says what is drawn: `id`, `title`, `unit`, `write` and `names(run)`. */
  constructor(kind, view) {
    this.kind = kind;
    this.view = view;
    this.lines = [];
    this.base = make("canvas");
    this.over = make("canvas");
    this.plot = make("div", { className: "plot", role: "application", tabIndex: 0, "aria-roledescription": "chart" },
      this.base, this.over);
    this.log = make("button", { type: "button", "aria-pressed": "false", title: "logarithmic vertical axis" }, "log");
    this.log.onclick = () => view.switchLog(kind.id);
    this.wide = make("button", { type: "button", "aria-pressed": "false", title: "chart over the whole width" }, "wide");
    this.wide.onclick = () => view.switchWide(kind.id);
    this.unit = make("span", { className: "unit" }, kind.unit ?? "");
    const head = make("header", {}, make("h2", {}, kind.title), this.unit, this.log, this.wide);
    for (const button of [this.log, this.wide]) button.setAttribute("aria-label", `${kind.title}: ${button.title}`);
    this.legend = make("p", { className: "legend" });
    this.card = make("article", { className: "chart" }, head, this.plot, this.legend);
    new ResizeObserver(() => this.draw()).observe(this.plot);
    listen(this);
  }

  /** The lines to draw: for each run that is shown, each of its measurements of this chart. */
  collect() {
    const { view } = this;
    this.lines = [];
    const names = new Set();
    for (const run of view.shownRuns()) {
      for (const name of this.kind.names(run)) {
        names.add(name);
        const detail = view.zoom && run.detail?.series.get(name);
        const points = detail && this.coversZoom(run) ? detail : run.points(name);
        if (points?.length) this.lines.push({ run, name, points });
      }
    }
    this.names = [...names];
    for (const line of this.lines) {
      line.dash = DASHES[this.names.indexOf(line.name) % DASHES.length];
      line.label = this.kind.label?.(line.name) ?? line.name;
      line.isSparse = line.name.startsWith("eval");
      line.colour = view.colour(line.run);
      const isExact = line.isSparse || this.kind.isExact;
      line.values = isExact ? line.points.value : line.points.smooth(view.smoothing);
      // Spikes are in the range, unless the smoothing leaves them out.
      line.ranged = view.smoothing > 0 ? line.values : line.points.value;
    }
  }

  coversZoom(run) {
    const loss = run.points("loss");
    const [low, high] = this.view.zoom.map((at) => loss.convert(this.view.x, "step", at));
    return run.detail.first <= Math.ceil(low) && run.detail.last >= Math.floor(high);
  }

  /** The horizontal range that is drawn. */
  range() {
    if (this.view.zoom) return this.view.zoom;
    return this.view.fullRange();
  }

  draw() {
    const { width, height } = this.plot.getBoundingClientRect();
    if (width < 50) return;
    this.collect();
    const isLog = this.view.logs.has(this.kind.id);
    this.log.setAttribute("aria-pressed", isLog);
    this.wide.setAttribute("aria-pressed", this.view.wides.has(this.kind.id));
    this.card.classList.toggle("wide", this.view.wides.has(this.kind.id));
    const context = fit(this.base, width, height);
    fit(this.over, width, height);
    const [first, last] = this.range();
    this.horizontal = new Axis(first, last, LEFT, width - RIGHT);
    const range = rangeOf(this.visibleValues(first, last), this.view.ignoresOutliers, isLog) ?? [0, 1];
    this.vertical = new Axis(...range, height - BOTTOM, TOP, isLog).padded(0.05);
    this.drawAxes(context, width, height);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP, width - LEFT - RIGHT, height - TOP - BOTTOM);
    context.clip();
    if (this.view.marks) this.drawEvents(context, height);
    for (const line of this.lines) this.drawLine(context, line, first, last);
    context.restore();
    this.drawLegend();
    this.plot.setAttribute("aria-label", this.description());
    this.drawCursor();
  }

  visibleValues(first, last) {
    const values = [];
    for (const { points, ranged } of this.lines) {
      const begin = Math.max(points.placeOf(this.view.x, first) - 1, 0);
      const end = Math.min(points.placeOf(this.view.x, last) + 1, points.length);
      for (let at = begin; at < end; at += 1) values.push(ranged[at]);
    }
    return values;
  }

  drawAxes(context, width, height) {
    const { ink, soft, line } = this.view.inks();
    context.font = "11px system-ui, sans-serif";
    context.lineWidth = 1;
    context.strokeStyle = line;
    context.fillStyle = soft;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const tick of this.vertical.ticks(6, this.kind.stepOf)) {
      const y = Math.round(this.vertical.pixel(tick)) + 0.5;
      if (y < TOP || y > height - BOTTOM + 1) continue;
      stroke(context, [[LEFT, y], [width - RIGHT, y]]);
      context.fillText(this.kind.write(tick), LEFT - 6, y);
    }
    const { tick: write } = HORIZONTAL[this.view.x];
    context.textBaseline = "top";
    context.textAlign = "center";
    const count = Math.max(2, Math.floor((width - LEFT - RIGHT) / 72));
    for (const tick of this.horizontal.ticks(count, HORIZONTAL[this.view.x].stepOf)) {
      const x = Math.round(this.horizontal.pixel(tick)) + 0.5;
      stroke(context, [[x, TOP], [x, height - BOTTOM + 4]]);
      const text = write(tick);
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(x, width - half - 1), height - BOTTOM + 7);
    }
    context.strokeStyle = ink;
  }

  /** Starts are dashed lines, checkpoints marks at the bottom, and what went wrong marks at the top. */
  drawEvents(context, height) {
    for (const run of this.view.shownRuns()) {
      context.strokeStyle = this.view.colour(run);
      context.fillStyle = this.view.colour(run);
      context.lineWidth = 1;
      let [lastMark, lastBad] = [-10, -10];
      for (const event of run.events) {
        const x = this.horizontal.pixel(event[this.view.x]);
        if (x < LEFT - 5 || x > this.horizontal.end + 5) continue;
        if (event.kind === "resume") {
          context.setLineDash([3, 3]);
          stroke(context, [[x, TOP], [x, height - BOTTOM]]);
          context.setLineDash([]);
        } else if (BAD_EVENTS.includes(event.kind) && x - lastBad >= 2) {
          lastBad = x;
          triangle(context, x, TOP, 5);
        } else if (event.kind === "checkpoint" && x - lastMark >= 2) {
          lastMark = x;
          triangle(context, x, height - BOTTOM, -5);
        }
      }
    }
  }

  drawLine(context, line, first, last) {
    const { points, values, colour } = line;
    const begin = Math.max(points.placeOf(this.view.x, first) - 1, 0);
    const end = Math.min(points.placeOf(this.view.x, last) + 1, points.length);
    context.strokeStyle = colour;
    context.fillStyle = colour;
    context.lineJoin = "round";
    if (values !== points.value) {
      context.globalAlpha = this.view.smoothing > 0 ? 0.22 : 0.4;
      context.lineWidth = 1;
      this.trace(context, points, points.value, begin, end);
      context.globalAlpha = 1;
    }
    // Many points are a band, in which a thick line hides the others.
    context.lineWidth = end - begin > this.horizontal.end / 2 && values === points.value ? 1.1 : 1.8;
    context.setLineDash(line.dash);
    this.trace(context, points, values, begin, end);
    context.setLineDash([]);
    if (line.isSparse || end - begin <= 2) {
      for (let at = begin; at < end; at += 1) dot(context, this.at(points, values, at), end - begin > 80 ? 1.5 : 3);
    }
  }

  at(points, values, place) {
    return [this.horizontal.pixel(points[this.view.x][place]), this.vertical.pixel(values[place])];
  }

  trace(context, points, values, begin, end) {
    context.beginPath();
    let isDown = false;
    for (let place = begin; place < end; place += 1) {
      const [x, y] = this.at(points, values, place);
      // Numbers that are not finite are gaps; so is what a logarithm does not have.
      if (!Number.isFinite(y)) isDown = false;
      else if (isDown) context.lineTo(x, y);
      else {
        context.moveTo(x, y);
        isDown = true;
      }
    }
    context.stroke();
  }

  drawLegend() {
    const text = this.names.length > 1 ? this.names : [];
    const key = text.join("\n");
    if (this.legendKey === key) return;
    this.legendKey = key;
    const entries = text.map((name, at) => {
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      const dash = DASHES[at % DASHES.length].join(" ");
      svg.innerHTML = `<line x1="1" x2="25" y1="4" y2="4" stroke="currentColor" stroke-width="2" stroke-dasharray="${dash}"/>`;
      svg.setAttribute("aria-hidden", "true");
      return make("span", {}, svg, this.kind.label?.(name) ?? name);
    });
    this.legend.replaceChildren(...entries);
  }

  /** The cursor of all charts, and the range that is being selected in this one. */
  drawCursor() {
    const { width, height } = this.plot.getBoundingClientRect();
    const context = this.over.getContext("2d");
    context.clearRect(0, 0, width, height);
    if (!this.horizontal) return;
    if (this.selected) {
      const [a, b] = this.selected.map((x) => Math.min(Math.max(x, LEFT), width - RIGHT));
      context.fillStyle = this.view.inks().accent;
      context.globalAlpha = 0.18;
      context.fillRect(Math.min(a, b), TOP, Math.abs(b - a), height - TOP - BOTTOM);
      context.globalAlpha = 1;
    }
    if (this.view.cursor === null) return;
    const x = this.horizontal.pixel(this.view.cursor);
    if (x < LEFT - 1 || x > width - RIGHT + 1) return;
    context.strokeStyle = this.view.inks().soft;
    stroke(context, [[x, TOP], [x, height - BOTTOM]]);
    for (const { points, values, colour } of this.lines) {
      const place = points.nearest(this.view.x, this.view.cursor);
      const [px, py] = place < 0 ? [NaN, NaN] : this.at(points, values, place);
      if (Number.isFinite(py) && px >= LEFT - 1 && px <= width - RIGHT + 1 && py >= TOP && py <= height - BOTTOM) {
        context.fillStyle = colour;
        dot(context, [px, py], 3.5);
      }
    }
  }

  description() {
    const runs = new Set(this.lines.map((line) => line.run));
    const lasts = this.lines.slice(0, 6).map(({ run, label, points }) =>
      `${run.name}, ${label}: ${this.kind.write(points.last())} at step ${points.step[points.length - 1]}`);
    return `${this.kind.title}, ${runs.size} runs. ${lasts.join("; ")}`;
  }
}

/** Gives a canvas the resolution of the screen. */
function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function stroke(context, [[x, y], ...rest]) {
  context.beginPath();
  context.moveTo(x, y);
  rest.forEach(([a, b]) => context.lineTo(a, b));
  context.stroke();
}

function dot(context, [x, y], radius) {
  if (!Number.isFinite(y)) return;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
}

function triangle(context, x, y, size) {
  context.beginPath();
  context.moveTo(x - size, y);
  context.lineTo(x + size, y);
  context.lineTo(x, y + 1.4 * size);
  context.fill();
}
