// Axes: from numbers to pixels, and where the marks are.

import { duration, number, whole } from "./text.js";

/** A linear or logarithmic axis from `low` to `high`, drawn from pixel `begin` to pixel `end`. */
export class Axis {
  constructor(low, high, begin, end, isLog = false) {
    this.isLog = isLog && low > 0;
    const to = this.isLog ? Math.log10 : (value) => value;
    [this.a, this.b] = [to(low), to(high)];
    // A measurement that does not change has some digits of rounding.
    if (!(this.b - this.a > 1e-9 * Math.abs(this.b))) {
      const pad = this.isLog ? 0.05 : Math.abs(this.a) * 0.05 || 0.5;
      [this.a, this.b] = [this.a - pad, this.b + pad];
    }
    [this.begin, this.end] = [begin, end];
  }

  pixel(value) {
    const at = this.isLog ? Math.log10(value) : value;
    return this.begin + ((at - this.a) / (this.b - this.a)) * (this.end - this.begin);
  }

  value(pixel) {
    const at = this.a + ((pixel - this.begin) / (this.end - this.begin)) * (this.b - this.a);
    return this.isLog ? 10 ** at : at;
  }

  /** The axis with some room on both sides. */
  padded(share) {
    const room = (this.b - this.a) * share;
    this.a -= room;
    this.b += room;
    return this;
  }

  /** About `count` round numbers; `stepOf` says which distance of at least a number is round. */
  ticks(count, stepOf = roundStep) {
    if (this.isLog) return logTicks(this.a, this.b, count);
    const step = stepOf((this.b - this.a) / count);
    const ticks = [];
    for (let at = Math.ceil(this.a / step); at * step <= this.b; at += 1) ticks.push(at * step);
    return ticks;
  }
}

function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least * 0.999);
}

const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

function timeStep(least) {
  if (least < 1) return roundStep(least);
  return TIMES.find((step) => step >= least) ?? 86400 * roundStep(least / 86400);
}

/** A round number of bytes. */
export function byteStep(least) {
  const unit = 1024 ** Math.max(0, Math.floor(Math.log2(Math.max(least, 1)) / 10));
  return unit * roundStep(Math.max(least, 1) / unit);
}

function logTicks(a, b, count) {
  const factors = b - a < 1.2 ? [1, 1.5, 2, 3, 5, 7] : b - a < 2.5 ? [1, 2, 5] : [1];
  const ticks = [];
  const every = factors.length > 1 ? 1 : Math.max(1, Math.round((b - a) / count));
  for (let power = Math.floor(a); power <= Math.ceil(b); power += every) {
    for (const factor of factors) ticks.push(factor * 10 ** power);
  }
  const inside = ticks.filter((tick) => Math.log10(tick) >= a && Math.log10(tick) <= b);
  if (inside.length >= 2) return inside;
  const linear = new Axis(10 ** a, 10 ** b, 0, 1).ticks(Math.max(count - 1, 2));
  return linear.filter((tick) => tick > 0);
}

/** The horizontal axes: names, how a number on them is written, how a round one is, and which are round. */
export const HORIZONTAL = {
  step: { name: "step", write: whole, tick: (value) => (value < 1e4 ? String(value) : number(value, 6)) },
  tokens: { name: "tokens", write: (value) => number(value, 5), tick: (value) => number(value, 6) },
  seconds: { name: "time", write: shortTime, tick: shortTime, stepOf: timeStep },
};

function shortTime(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const rounded = Math.round(seconds);
  if (rounded < 3600) return rounded % 60 ? duration(rounded) : `${rounded / 60} min`;
  if (rounded < 86400) return rounded % 3600 ? duration(rounded) : `${rounded / 3600} h`;
  return rounded % 86400 ? duration(rounded) : `${rounded / 86400} d`;
}

/** The range of finite values; without the outermost hundredths if outliers are ignored. */
export function rangeOf(values, ignoresOutliers, isLog) {
  const usable = values.filter((value) => Number.isFinite(value) && (!isLog || value > 0));
  if (usable.length === 0) return null;
  if (!ignoresOutliers || usable.length < 20) {
    let [low, high] = [usable[0], usable[0]];
    for (const value of usable) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return [low, high];
  }
  usable.sort((a, b) => a - b);
  const at = (share) => usable[Math.round(share * (usable.length - 1))];
  return [at(0.01), at(0.99)];
}
