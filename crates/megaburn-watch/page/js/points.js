// The points of a measurement, column by column: step, tokens, seconds, value, and the mean of the points
// that a point stands for.

/** More points than this are thinned out. */
const MOST = 24000;
/** The number to which they are. */
const KEPT = 8000;

export class Points {
  constructor() {
    this.step = [];
    this.tokens = [];
    this.seconds = [];
    this.value = [];
    this.mean = [];
    /** Changes whenever the points do. */
    this.version = 0;
    this.isThinned = false;
    this.smoothed = { key: "", values: [] };
  }

  get length() {
    return this.step.length;
  }

  /** Appends what the server sent; null is a number that is not finite. */
  append(columns) {
    const finite = (value) => (value === null ? NaN : value);
    const means = columns.mean ?? columns.value;
    this.isThinned ||= columns.mean !== undefined;
    for (let at = 0; at < columns.step.length; at += 1) {
      this.step.push(columns.step[at]);
      this.tokens.push(columns.tokens[at]);
      this.seconds.push(columns.seconds[at]);
      this.value.push(finite(columns.value[at]));
      this.mean.push(finite(means[at]));
    }
    if (this.length > MOST) this.thin();
    this.version += 1;
  }

  /** Of each group, keeps the first, the smallest, the largest and the last, as the server does. */
  thin() {
    const group = Math.ceil(this.length / (KEPT / 4));
    const kept = { step: [], tokens: [], seconds: [], value: [], mean: [] };
    for (let begin = 0; begin < this.length; begin += group) {
      const end = Math.min(begin + group, this.length);
      let [low, high, bad, sum, count] = [-1, -1, -1, 0, 0];
      for (let at = begin; at < end; at += 1) {
        const value = this.value[at];
        if (Number.isNaN(value)) {
          bad = bad < 0 ? at : bad;
          continue;
        }
        if (low < 0 || value < this.value[low]) low = at;
        if (high < 0 || value > this.value[high]) high = at;
        sum += this.mean[at];
        count += 1;
      }
      const places = new Set([begin, low, high, bad, end - 1].filter((at) => at >= 0));
      for (const at of [...places].sort((a, b) => a - b)) {
        for (const name of ["step", "tokens", "seconds", "value"]) kept[name].push(this[name][at]);
        kept.mean.push(Number.isNaN(this.value[at]) ? NaN : sum / count);
      }
    }
    Object.assign(this, kept);
    this.isThinned = true;
  }

  /** The values that are drawn: a running mean with `weight` for what came before, or the values. Where points stand
   * for many, their means are drawn. */
  smooth(weight) {
    if (weight === 0) return this.isThinned ? this.mean : this.value;
    const key = `${weight} ${this.version}`;
    if (this.smoothed.key !== key) {
      let [mean, mass] = [0, 0];
      const values = this.mean.map((value) => {
        if (Number.isNaN(value)) return NaN;
        mean = weight * mean + (1 - weight) * value;
        mass = weight * mass + (1 - weight);
        return mean / mass;
      });
      this.smoothed = { key, values };
    }
    return this.smoothed.values;
  }

  /** The first place whose `x` is at least a number. */
  placeOf(x, at) {
    const column = this[x];
    let [low, high] = [0, column.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (column[middle] < at) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** The place nearest to a number on the axis `x`; -1 without points. */
  nearest(x, at) {
    if (this.length === 0) return -1;
    const after = Math.min(this.placeOf(x, at), this.length - 1);
    const before = Math.max(after - 1, 0);
    return Math.abs(this[x][before] - at) <= Math.abs(this[x][after] - at) ? before : after;
  }

  /** The number on the axis `to` that belongs to one on the axis `from`. */
  convert(from, to, at) {
    if (this.length === 0) return NaN;
    const after = Math.min(Math.max(this.placeOf(from, at), 1), this.length - 1);
    const before = Math.max(after - 1, 0);
    const width = this[from][after] - this[from][before];
    const share = width > 0 ? Math.min(Math.max((at - this[from][before]) / width, 0), 1) : 0;
    return this[to][before] + share * (this[to][after] - this[to][before]);
  }

  last() {
    return this.length > 0 ? this.value[this.length - 1] : NaN;
  }

  /** The smallest or the largest finite value, and its step. */
  extreme(isBetter) {
    let best = -1;
    for (let at = 0; at < this.length; at += 1) {
      const value = this.value[at];
      if (!Number.isNaN(value) && (best < 0 || isBetter(value, this.value[best]))) best = at;
    }
    return best < 0 ? null : { value: this.value[best], step: this.step[best] };
  }
}
