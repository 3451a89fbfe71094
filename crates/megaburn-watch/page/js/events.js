// What happened to the runs: starts, checkpoints, skipped steps, spikes.

import { HORIZONTAL } from "./axes.js";
import { make, table, whole } from "./text.js";

/** The most rows that are shown. */
const MOST = 500;
const KINDS = {
  start: "", resume: "", checkpoint: "", upload: "", skipped: "warn", "not finite": "bad", spike: "warn",
  "fall-back": "warn", "fall-back ended": "", recipe: "", note: "",
};

export class Events {
  constructor(view, place) {
    this.view = view;
    this.hidden = new Set();
    this.filters = make("div", { className: "filters", role: "group", "aria-label": "Kinds of events" });
    this.rows = make("div");
    place.append(make("div", { className: "panel" }, this.filters, this.rows));
  }

  update() {
    const runs = this.view.shownRuns();
    const all = runs.flatMap((run) => run.events.map((event) => ({ run, ...event })));
    const kinds = Object.keys(KINDS).filter((kind) => all.some((event) => event.kind === kind));
    if (this.kinds !== kinds.join()) {
      this.kinds = kinds.join();
      this.filters.replaceChildren(...kinds.map((kind) => this.filter(kind)));
    }
    const shown = all.filter((event) => !this.hidden.has(event.kind)).sort((a, b) => b.step - a.step);
    const rows = shown.slice(0, MOST).map(({ run, step, seconds, kind, text, time }) => ({
      cells: [
        make("span", {}, make("span", { className: "swatch", style: { background: this.view.colour(run) } }), ` ${run.name}`),
        { number: whole(step) },
        make("span", { className: KINDS[kind] }, kind),
        text,
        time ? new Date(time).toLocaleString() : HORIZONTAL.seconds.write(seconds),
      ],
    }));
    const heads = ["Run", { number: "Step" }, "Event", "What", "When, or time in training"];
    const leftOut = runs.reduce((sum, run) => sum + run.eventsLeftOut, 0) + Math.max(shown.length - MOST, 0);
    const note = (text) => make("p", { className: "empty" }, text);
    const found = rows.length > 0 ? table(heads, rows, "Events, the last ones first") : note("Nothing has happened yet.");
    const rest = leftOut > 0 ? [note(`${whole(leftOut)} earlier events are not shown.`)] : [];
    this.rows.replaceChildren(found, ...rest);
  }

  filter(kind) {
    const box = make("input", { type: "checkbox", checked: !this.hidden.has(kind) });
    box.onchange = () => {
      if (box.checked) this.hidden.delete(kind);
      else this.hidden.add(kind);
      this.update();
    };
    return make("label", {}, box, ` ${kind}`);
  }
}
