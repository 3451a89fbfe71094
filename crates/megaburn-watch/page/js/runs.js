// The runs, as the server has them, and what was read of each.

import { Points } from "./points.js";

/** How often the server is asked, in milliseconds: while a run trains, otherwise, and behind other tabs. */
const OFTEN = 1500;
const SELDOM = 5000;
const HIDDEN = 20000;

/** A run without a lock is taken for running if it wrote in the last seconds of this number. */
const QUIET = 180;

/** The most events of a run that are kept. */
const MOST_EVENTS = 2000;

async function get(path) {
  const response = await fetch(path);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ?? response.statusText);
  return body;
}

export class Run {
  constructor(id) {
    this.id = id;
    this.info = {};
    this.error = null;
    this.seen = null;
    this.isReading = false;
    this.clear();
  }

  clear() {
    this.series = new Map();
    this.events = [];
    this.eventsLeftOut = 0;
    this.layers = { experts: null, precision: null };
    this.detail = null;
    this.to = 0;
    this.mark = "";
    this.recipe = null;
    this.spikes = { mean: NaN, deviation: 0, count: 0, rest: 0 };
  }

  get name() {
    return this.info.name ?? `run ${this.id}`;
  }

  /** The share of the file that was read. */
  get progress() {
    return this.info.size > 0 ? this.to / this.info.size : 1;
  }

  points(name) {
    return this.series.get(name);
  }

  /** The last step, and the number of steps of the full run if it is known. */
  steps() {
    const loss = this.points("loss");
    return { step: loss?.length ? loss.step[loss.length - 1] : 0, of: this.info.state?.steps ?? null };
  }

  /** What the run does: a word, and whether it is good, bad or a warning. */
  state() {
    const { state, holder, exists, size, quiet_seconds: quiet } = this.info;
    if (exists === false) return ["folder removed", "warn"];
    if (holder) return ["running", "good live"];
    if (!state) return [size > 0 ? "not running" : "has not begun", "warn"];
    if (state.state === "running") {
      // Some file systems do not show the locks of other hosts.
      return quiet !== null && quiet < QUIET ? ["running", "good live"] : ["interrupted", "bad"];
    }
    return [state.state, { finished: "good", failed: "bad" }[state.state] ?? "warn"];
  }

  /** Reads what is new. Long files come in parts; `changed` is called after each. */
  async read(changed) {
    const seen = `${this.info.file} ${this.info.size}`;
    if (this.seen === seen || this.isReading) return;
    this.isReading = true;
    try {
      for (;;) {
        const path = `/api/runs/${this.id}/metrics?from=${this.to}&mark=${this.mark}`;
        const part = await get(path);
        if (part.reset) this.clear();
        this.add(part);
        changed(this);
        if (part.to === part.from || part.to >= part.size) break;
      }
      this.seen = seen;
      this.error = null;
    } catch (error) {
      this.error = error.message;
      changed(this);
    } finally {
      this.isReading = false;
    }
  }

  add(part) {
    for (const [name, columns] of Object.entries(part.series)) {
      if (!this.series.has(name)) this.series.set(name, new Points());
      this.series.get(name).append(columns);
    }
    for (const event of part.events) {
      if (event.kind === "recipe") {
        if (event.text === this.recipe) continue;
        this.recipe = event.text;
      }
      this.events.push(event);
    }
    if (part.series.loss) this.addSpikes(part.series.loss);
    this.events.sort((a, b) => a.step - b.step);
    const tooMany = Math.max(this.events.length - MOST_EVENTS, 0);
    this.events.splice(0, tooMany);
    this.eventsLeftOut += part.events_left_out + tooMany;
    for (const kind of ["experts", "precision"]) this.layers[kind] = part.layers[kind] ?? this.layers[kind];
    this.to = part.to;
    this.mark = part.mark;
  }

  /** A spike is a loss that is a tenth and eight mean deviations above the running mean. */
  addSpikes({ step, tokens, seconds, value }) {
    const state = this.spikes;
    value.forEach((loss, at) => {
      if (loss === null) return;
      const above = loss - state.mean;
      const isSpike = state.count > 50 && above > 8 * state.deviation && above > 0.1 * Math.abs(state.mean);
      state.rest = Math.max(state.rest - 1, 0);
      if (isSpike && state.rest === 0) {
        const text = `loss ${loss.toPrecision(4)}, running mean ${state.mean.toPrecision(4)}`;
        this.events.push({ step: step[at], tokens: tokens[at], seconds: seconds[at], kind: "spike", text, time: null });
      }
      if (isSpike) state.rest = 50;
      const weight = isSpike ? 0.001 : Math.max(0.02, 1 / (state.count + 1));
      state.mean = state.count === 0 ? loss : state.mean + weight * above;
      state.deviation += weight * (Math.abs(state.count === 0 ? 0 : above) - state.deviation);
      state.count += 1;
    });
  }

  /** Reads the points of a range of steps, if those that are here are thinned out. */
  async readDetail(first, last, changed) {
    const { detail } = this;
    const isWhole = detail && !detail.series.get("loss")?.isThinned;
    if ((isWhole && detail.first <= first && detail.last >= last) || !this.points("loss")?.isThinned) return;
    const range = (this.detail = { first, last, series: new Map() });
    try {
      const part = await get(`/api/runs/${this.id}/metrics?first=${first}&last=${last}`);
      if (this.detail !== range) return;
      if (part.too_many) {
        this.detail = null;
        return;
      }
      const loss = this.points("loss");
      for (const [name, columns] of Object.entries(part.series)) {
        const points = new Points();
        columns.tokens = columns.step.map((step) => loss.convert("step", "tokens", step));
        columns.seconds = columns.step.map((step) => loss.convert("step", "seconds", step));
        points.append(columns);
        range.series.set(name, points);
      }
      changed(this);
    } catch {
      // The thinned points remain, and the next zoom asks again.
      if (this.detail === range) this.detail = null;
    }
  }
}

/** Asks the server again and again. */
export class Runs {
  constructor(changed, status) {
    this.all = [];
    this.changed = changed;
    this.status = status;
  }

  async start() {
    for (;;) {
      const delay = await this.poll();
      await new Promise((resolve) => {
        const wake = (event) => {
          if (event && document.hidden) return;
          clearTimeout(timer);
          document.removeEventListener("visibilitychange", wake);
          resolve();
        };
        const timer = setTimeout(() => wake(null), delay);
        document.addEventListener("visibilitychange", wake);
      });
    }
  }

  async poll() {
    try {
      const { runs } = await get("/api/runs");
      runs.forEach((info, id) => {
        this.all[id] ??= new Run(id);
        const run = this.all[id];
        const look = () => JSON.stringify([{ ...run.info, quiet_seconds: 0 }, run.state()]);
        const before = look();
        run.info = info;
        if (look() !== before) this.changed(run);
      });
      this.status(runs.length === 0 ? "no run yet" : "up to date", "");
      await Promise.all(this.all.map((run) => run.read(this.changed)));
    } catch {
      this.status("the server does not answer; is `megaburn watch` running?", "bad");
      return SELDOM;
    }
    if (document.hidden) return HIDDEN;
    return this.all.some((run) => run.state()[0] === "running") || this.all.length === 0 ? OFTEN : SELDOM;
  }
}
