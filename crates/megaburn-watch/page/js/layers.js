// Measurements of layers: the load of experts, and what quantised matrices lose.

import { make, number, percent, table } from "./text.js";

/** The most matrices that are listed. */
const MOST = 30;

export class Layers {
  constructor(view, place) {
    this.view = view;
    this.place = make("div", { className: "panel" });
    place.append(this.place);
  }

  update() {
    const parts = this.view.shownRuns().flatMap((run) => [...experts(run), ...precision(run)]);
    const empty = "No run that is shown has measurements of layers. Models with experts write them in each step, and runs " +
      "with quantised products in the steps of precision.log_interval.";
    this.place.replaceChildren(...(parts.length > 0 ? parts : [make("p", { className: "empty" }, empty)]));
  }
}

function experts(run) {
  const found = run.layers.experts;
  const busiest = found?.experts.busiest ?? [];
  if (busiest.length === 0) return [];
  const idlest = found.experts.idlest ?? [];
  const most = Math.max(...busiest, 1);
  const rows = busiest.map((high, layer) => {
    const low = idlest[layer] ?? 0;
    const share = (value) => `${(100 * value) / most}%`;
    const bar = make("div", { className: "bar", role: "img", "aria-label": `from ${number(low, 3)} to ${number(high, 3)}` },
      make("i", { style: { left: share(low), width: share(high - low) } }), make("b", { style: { left: share(1) } }));
    return { cells: [{ number: String(layer + 1) }, { number: number(low, 3) }, { number: number(high, 3) }, bar] };
  });
  return [
    make("h3", {}, `${run.name}: experts' load at step ${found.step}`),
    make("p", { className: "empty" }, "Tokens of the idlest and the busiest expert of each layer, relative to the mean (the upright line)."),
    table([{ number: "Layer with experts" }, { number: "Idlest" }, { number: "Busiest" }, "Range"], rows, "Experts' load"),
  ];
}

function precision(run) {
  const found = run.layers.precision;
  if (!found) return [];
  const matrices = Object.entries(found.layers).flatMap(([layer, of]) =>
    Object.entries(of).filter(([, lost]) => lost).map(([matrix, lost]) => ({ layer, matrix, ...lost })));
  const worst = (lost) => Math.max(lost.saturated, lost.underflowed);
  matrices.sort((a, b) => worst(b) - worst(a));
  const rows = matrices.slice(0, MOST).map(({ layer, matrix, saturated, underflowed, amax }) => ({
    cells: [layer, matrix, { number: percent(saturated) }, { number: percent(underflowed) }, { number: number(amax) }],
  }));
  const heads = ["Layer", "Matrix", { number: "Saturated" }, { number: "Became zero" }, { number: "Largest magnitude" }];
  return [
    make("h3", {}, `${run.name}: quantised matrices at step ${found.step}, those that lose most first`),
    table(heads, rows, "Quantised matrices"),
    make("p", { className: "empty" }, `${matrices.length} matrices in all.`),
  ];
}
