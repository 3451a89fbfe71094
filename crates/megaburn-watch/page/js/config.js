// Layout and configuration of a run, and what differs from another run.

import { make, table } from "./text.js";

export class Config {
  constructor(view, place) {
    this.view = view;
    this.own = select("Run", () => this.load());
    this.other = select("compared with", () => this.load());
    this.same = make("input", { type: "checkbox" });
    this.same.onchange = () => this.load();
    this.body = make("div");
    const all = make("label", {}, this.same, " also keys that are equal");
    place.append(make("div", { className: "panel" },
      make("div", { className: "filters" }, this.own.label, this.other.label, all), this.body));
    this.key = null;
  }

  /** Fills the lists of runs; the text is read when the page of it is opened or a run changes. */
  update(isOpen) {
    const runs = this.view.runs();
    const names = runs.map((run) => run.name).join("\n");
    if (this.names !== names) {
      this.names = names;
      fill(this.own.list, runs, false);
      fill(this.other.list, runs, true);
    }
    const starts = (list) => runs[Number(list.value)]?.events.filter((event) => /start|resume/.test(event.kind)).length;
    const key = [this.own.list.value, this.other.list.value, starts(this.own.list), starts(this.other.list)].join();
    if (isOpen && this.key !== key) {
      this.key = key;
      this.load();
    }
  }

  async load() {
    const runs = this.view.runs();
    const chosen = ({ list }) => (list.value === "" ? null : runs[Number(list.value)]);
    const [own, other] = [chosen(this.own), chosen(this.other)];
    if (!own) return;
    try {
      const [mine, others] = await Promise.all([own, other].map((run) => (run ? config(run) : null)));
      const parts = others
        ? this.difference(own, mine, other, others)
        : [make("pre", { tabIndex: 0, "aria-label": mine.path }, mine.text)];
      const head = make("h3", {}, others ? "What differs" : mine.path);
      this.body.replaceChildren(...layout(own), ...(await picture(own)), head, ...parts);
    } catch (error) {
      this.body.replaceChildren(make("p", { className: "empty" }, error.message));
    }
  }

  difference(own, mine, other, others) {
    const keys = [...new Set([...Object.keys(mine.keys), ...Object.keys(others.keys)])].sort();
    const differs = (key) => mine.keys[key] !== others.keys[key];
    const shown = keys.filter((key) => this.same.checked || differs(key));
    const rows = shown.map((key) => ({
      cells: [key, mine.keys[key] ?? "(not set)", others.keys[key] ?? "(not set)"],
      className: this.same.checked && differs(key) ? "differs" : "",
    }));
    const count = keys.filter(differs).length;
    const sum = make("p", {}, count === 0 ? "All keys are equal." : `${count} of ${keys.length} keys differ.`);
    return [sum, rows.length > 0 ? table(["Key", own.name, other.name], rows, "Configurations") : ""];
  }
}

function select(text, changed) {
  const list = make("select", { "aria-label": text });
  list.onchange = changed;
  return { list, label: make("label", {}, `${text} `, list) };
}

function fill(list, runs, hasNone) {
  const before = list.value;
  const options = runs.map((run) => make("option", { value: String(run.id) }, run.name));
  list.replaceChildren(...(hasNone ? [make("option", { value: "" }, "no other run")] : []), ...options);
  if ([...list.options].some((option) => option.value === before)) list.value = before;
}

async function config(run) {
  const response = await fetch(`/api/runs/${run.id}/config`);
  const found = await response.json();
  if (!response.ok) throw new Error(`${run.name}: ${found.error}`);
  return found;
}

/** The layouts of the run's starts. */
function layout(run) {
  const starts = run.events.filter((event) => /start|resume/.test(event.kind));
  const last = starts.at(-1)?.text.match(/layout ([^;]*)/)?.[1];
  return last ? [make("h3", {}, `${run.name}: layout ${last}`)] : [];
}

async function picture(run) {
  const path = `/api/runs/${run.id}/pipeline.svg`;
  const response = await fetch(path);
  if (!response.ok) return [];
  const alt = `The pipeline's schedule of ${run.name}: a row for each rank, time to the right`;
  const image = make("img", { src: path, alt });
  return [make("p", {}, "One step of the pipeline, if a backward pass takes twice the time of a forward pass:"),
    make("div", { className: "picture", tabIndex: 0 }, image)];
}
