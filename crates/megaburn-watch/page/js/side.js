// The list of runs.

import { byId, duration, make, number, whole } from "./text.js";

export class Side {
  constructor(view) {
    this.view = view;
    this.items = new Map();
    byId("show-all").onclick = () => view.showOnly(() => true);
    byId("show-none").onclick = () => view.showOnly(() => false);
  }

  update() {
    for (const run of this.view.runs()) {
      if (!this.items.has(run.id)) this.items.set(run.id, this.add(run));
      this.fill(run, this.items.get(run.id));
    }
  }

  add(run) {
    const { view } = this;
    const box = make("input", { type: "checkbox", checked: view.isShown(run), id: `run-${run.id}` });
    box.onchange = () => view.show(run, box.checked);
    const swatch = make("span", { className: "swatch" });
    const name = make("label", { className: "title", htmlFor: box.id });
    const only = make("button", { type: "button", className: "only" }, "only");
    only.onclick = () => view.showOnly((other) => other === run);
    const state = make("span", { className: "badge" });
    const steps = make("span");
    const values = make("p");
    const reason = make("p");
    byId("runs").append(make("li", {}, make("div", { className: "name" }, box, swatch, name, only),
      make("p", {}, state, " ", steps), values, reason));
    return { box, swatch, name, only, state, steps, values, reason };
  }

  fill(run, item) {
    const { view } = this;
    const [word, kind] = run.state();
    const { step, of } = run.steps();
    const text = (element, value) => {
      if (element.textContent !== value) element.textContent = value;
    };
    item.box.checked = view.isShown(run);
    item.swatch.style.background = view.colour(run);
    text(item.name, run.name);
    item.name.title = run.info.folder ?? "";
    item.only.setAttribute("aria-label", `show only ${run.name}`);
    text(item.state, word);
    item.state.className = `badge ${kind}`;
    const left = word === "running" ? timeLeft(run, step, of) : "";
    const isPart = run.progress < 1 && run.isReading;
    const reading = isPart ? `; reading, ${Math.round(100 * run.progress)}%` : "";
    text(item.steps, `step ${whole(step)}${of ? ` of ${whole(of)}` : ""}${left}${reading}`);
    const last = (name, before) => {
      const points = run.points(name);
      return points?.length ? `${before} ${number(points.last())}` : null;
    };
    const rate = run.points("tokens_per_second");
    const values = [last("loss", "loss"), last("eval_loss", "validation"), rate?.length ? `${number(rate.last(), 3)} tokens/s` : null];
    text(item.values, values.filter(Boolean).join(", "));
    const reason = run.error ?? run.info.state?.reason ?? "";
    text(item.reason, reason);
    item.reason.className = run.error || word === "failed" ? "bad" : "";
    item.reason.hidden = reason === "";
  }
}

/** The time that the remaining steps take, by the last fifty points. */
function timeLeft(run, step, of) {
  const loss = run.points("loss");
  if (!of || !loss || loss.length < 3 || step >= of) return "";
  const [last, before] = [loss.length - 1, Math.max(loss.length - 50, 0)];
  const pace = (loss.seconds[last] - loss.seconds[before]) / (loss.step[last] - loss.step[before]);
  return pace > 0 ? `, ${duration(pace * (of - step))} left` : "";
}
