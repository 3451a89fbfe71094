// The last and the best values of all measurements, run by run.

import { make, number, table, whole } from "./text.js";

/** Measurements of which the smallest value is the best. */
const SMALLER = /^(loss|sop_loss|eval_loss.*|mtp_losses.*)$/;
const LARGER = /^(tokens_per_second|tflops|mfu)$/;

export class Numbers {
  constructor(view, place) {
    this.view = view;
    this.place = make("div", { className: "panel" });
    place.append(this.place);
  }

  update() {
    const runs = this.view.shownRuns();
    const names = [...new Set(runs.flatMap((run) => [...run.series.keys()]))].sort(byImportance);
    if (names.length === 0) {
      this.place.replaceChildren(make("p", { className: "empty" }, "No run that is shown has steps."));
      return;
    }
    const head = (run) => ({
      number: make("span", {}, make("span", { className: "swatch", style: { background: this.view.colour(run) } }), ` ${run.name}`),
    });
    const progress = { cells: ["step", ...runs.map((run) => ({ number: whole(run.steps().step) }))] };
    const tokens = {
      cells: ["tokens so far", ...runs.map((run) => {
        const loss = run.points("loss");
        return { number: loss?.length ? number(loss.tokens[loss.length - 1]) : "" };
      })],
    };
    const rows = names.map((name) => ({ cells: [name, ...runs.map((run) => ({ number: cell(run, name) }))] }));
    this.place.replaceChildren(table(["Last value", ...runs.map(head)], [progress, tokens, ...rows], "Last values of all runs"));
  }
}

function byImportance(a, b) {
  const first = ["loss", "eval_loss"];
  const place = (name) => (first.includes(name) ? first.indexOf(name) : first.length);
  return place(a) - place(b) || (a < b ? -1 : 1);
}

function cell(run, name) {
  const points = run.points(name);
  if (!points?.length) return "";
  const plain = name.replace(/^eval /, "");
  const isBetter = SMALLER.test(plain) ? (a, b) => a < b : LARGER.test(plain) ? (a, b) => a > b : null;
  const best = isBetter && points.extreme(isBetter);
  const last = number(points.last(), 5);
  if (!best) return last;
  return make("span", {}, last, make("small", {}, `best ${number(best.value, 5)}, step ${whole(best.step)}`));
}
