// Which charts there are. A measurement that no chart below names gets one of its own.

import { byteStep } from "./axes.js";
import { Chart } from "./chart.js";
import { bytes, make, number, percent } from "./text.js";

const after = (prefix) => (name) => (name.startsWith(prefix) ? name.slice(prefix.length) : name);

/** Title, unit, how numbers are written, which measurements, and their names in the legend; `isExact`: no smoothing. */
const KINDS = [
  {
    id: "loss", title: "Loss", unit: "nats per token",
    has: (name) => name === "loss" || /^eval_loss(:|$)/.test(name),
    label: (name) => ({ loss: "training", eval_loss: "validation" })[name] ?? `validation, ${after("eval_loss:")(name)}`,
  },
  {
    id: "lr", title: "Learning rate",
    has: (name) => name === "lr" || name.startsWith("group_lrs."), label: after("group_lrs."), isExact: true,
  },
  { id: "grad_norm", title: "Gradient norm", unit: "before clipping" },
  { id: "tokens_per_second", title: "Throughput", unit: "tokens per second, all ranks" },
  { id: "mfu", title: "MFU", unit: "share of the GPU's peak", write: percent },
  { id: "tflops", title: "Operations per rank", unit: "TFLOP/s" },
  { id: "memory_bytes", title: "Memory", unit: "largest process", write: bytes, stepOf: byteStep, isExact: true },
  {
    id: "load", title: "Experts' load", unit: "tokens of an expert, relative to the mean",
    has: (name) => name === "experts.busiest" || name === "experts.idlest",
    label: (name) => (name === "experts.busiest" ? "busiest expert of any layer" : "idlest expert of any layer"),
  },
  {
    id: "experts", title: "Experts' losses", unit: "without coefficients",
    has: (name) => /^experts\.(aux_loss|seq_aux_loss|global_aux_loss|z_loss)$/.test(name), label: after("experts."),
    skipsZeros: true,
  },
  { id: "experts.dropped", title: "Dropped tokens", unit: "share of assignments", write: percent },
  {
    id: "precision", title: "Quantised products", unit: "share of elements, worst matrix", write: percent,
    has: (name) => name.startsWith("precision."), label: after("precision."),
  },
  {
    id: "mtp", title: "Losses of later tokens", unit: "nats per token",
    has: (name) => /^(eval )?mtp_losses\./.test(name), label: (name) => name.replace("mtp_losses.", "depth "),
  },
  { id: "loss_scale", title: "Loss scale", isExact: true },
  { id: "max_attention_logit", title: "Largest attention logit" },
  { id: "params_norm", title: "Norm of the parameters" },
  { id: "num_zeros", title: "Zeros in the gradient" },
  { id: "padding", title: "Padding", unit: "share of positions", write: percent },
  { id: "tokens", title: "Tokens of a step", unit: "that count in the loss", isExact: true },
];

/** The name of the chart of a measurement. */
function kindOf(name) {
  const plain = name.startsWith("eval ") ? name.slice(5).split(":")[0] : name;
  return KINDS.find((kind) => (kind.has ? kind.has(name) : kind.id === plain)) ?? { id: plain, title: plain };
}

export class Charts {
  constructor(view, place) {
    this.view = view;
    this.place = place;
    this.charts = new Map();
    this.empty = make("p", {}, "There are no steps yet. They appear here when the first one is done.");
  }

  /** Makes the charts of all measurements that there are. */
  update() {
    const names = new Set(this.view.runs().flatMap((run) => [...run.series.keys()]));
    for (const name of names) {
      const kind = kindOf(name);
      if (this.charts.has(kind.id)) continue;
      const has = (other) => kindOf(other).id === kind.id;
      const isZero = (run, other) => kind.skipsZeros && run.points(other).value.every((value) => value === 0);
      const order = (other) => (other.startsWith("eval") ? 1 : 0);
      this.charts.set(kind.id, new Chart({
        write: number, label: (other) => (other.startsWith("eval ") ? "validation" : other), ...kind,
        names: (run) => [...run.series.keys()].filter((other) => has(other) && !isZero(run, other))
          .sort((a, b) => order(a) - order(b)),
      }, this.view));
    }
    const place = (id) => {
      const at = KINDS.findIndex((kind) => kind.id === id);
      return at < 0 ? KINDS.length : at;
    };
    const ordered = [...this.charts.values()].sort((a, b) => place(a.kind.id) - place(b.kind.id));
    const isShown = (chart) => this.view.runs().some((run) => chart.kind.names(run).length > 0);
    const cards = ordered.filter(isShown).map((chart) => chart.card);
    const current = [...this.place.children];
    const wanted = cards.length > 0 ? cards : [this.empty];
    if (wanted.length !== current.length || wanted.some((card, at) => card !== current[at])) {
      this.place.replaceChildren(...wanted);
    }
  }

  draw() {
    for (const chart of this.charts.values()) if (chart.card.isConnected) chart.draw();
  }

  drawCursors() {
    for (const chart of this.charts.values()) if (chart.card.isConnected) chart.drawCursor();
  }
}
