// Puts the parts of the page together: what is shown, and how.

import { Charts } from "./charts.js";
import { Config } from "./config.js";
import { Events } from "./events.js";
import { Layers } from "./layers.js";
import { Numbers } from "./numbers.js";
import { Runs } from "./runs.js";
import { Side } from "./side.js";
import { byId } from "./text.js";

const LIGHT = ["#2563af", "#c2570c", "#0f8a72", "#8e3bb0", "#b3261e", "#7a6a00", "#0b7fab", "#c43a78", "#4d6b2f", "#5d5391"];
const DARK = ["#6ea8ff", "#ff9d57", "#3fd0b0", "#d08bff", "#ff7b72", "#e3c84a", "#56c7f2", "#ff8fc0", "#a3cf6f", "#b9a8f0"];

/** More runs than this are not all shown at first. */
const SHOWN_AT_FIRST = 10;

/** What is shown: which runs, on which axis, how smooth. All parts of the page look here. */
class View {
  x = "step";
  smoothing = 0;
  zoom = null;
  cursor = null;
  marks = true;
  ignoresOutliers = false;
  logs = new Set();
  wides = new Set();
  /** Whether a run is shown, by its number, where a person has said so. */
  chosen = new Map();
  isDark = false;

  constructor() {
    this.polled = new Runs(() => this.changed(), (text, kind) => this.status(text, kind));
    this.side = new Side(this);
    this.charts = new Charts(this, byId("charts"));
    this.tabs = {
      numbers: new Numbers(this, byId("numbers")),
      layers: new Layers(this, byId("layers")),
      events: new Events(this, byId("events")),
      config: new Config(this, byId("config")),
    };
    this.tab = "charts";
    this.listen();
    this.polled.start();
  }

  runs() {
    return this.polled.all.filter(Boolean);
  }

  isShown(run) {
    return this.chosen.get(run.id) ?? run.id < SHOWN_AT_FIRST;
  }

  shownRuns() {
    return this.runs().filter((run) => this.isShown(run));
  }

  show(run, isShown) {
    this.chosen.set(run.id, isShown);
    this.changed();
  }

  showOnly(isShown) {
    for (const run of this.runs()) this.show(run, isShown(run));
  }

  colour(run) {
    const colours = this.isDark ? DARK : LIGHT;
    return colours[run.id % colours.length];
  }

  /** The colours of axes and texts. */
  inks() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    return { ink: of("ink"), soft: of("soft"), line: of("line"), accent: of("accent") };
  }

  /** The range of the horizontal axis that all shown runs need. */
  fullRange() {
    let [first, last] = [Infinity, -Infinity];
    for (const run of this.shownRuns()) {
      const loss = run.points("loss");
      if (!loss?.length) continue;
      first = Math.min(first, loss[this.x][0]);
      last = Math.max(last, loss[this.x][loss.length - 1]);
    }
    if (!Number.isFinite(first)) return [0, 1];
    return this.x === "step" ? [first, Math.max(last, first + 1)] : [0, Math.max(last, 1e-3)];
  }

  setZoom(range) {
    this.zoom = range && range[1] > range[0] ? range : null;
    byId("reset").disabled = this.zoom === null;
    if (this.zoom) {
      for (const run of this.shownRuns()) {
        const loss = run.points("loss");
        if (!loss?.length) continue;
        const [first, last] = this.zoom.map((at) => loss.convert(this.x, "step", at));
        run.readDetail(Math.floor(first), Math.ceil(last), () => this.changed());
      }
    }
    this.changed();
  }

  setCursor(at) {
    this.cursor = at;
    this.charts.drawCursors();
  }

  switchLog(id) {
    toggle(this.logs, id);
    this.changed();
  }

  switchWide(id) {
    toggle(this.wides, id);
    this.changed();
  }

  status(text, kind) {
    const place = byId("status");
    if (place.textContent !== text) place.textContent = text;
    place.className = kind;
  }

  /** Draws what is visible anew, at most once a frame. */
  changed() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.side.update();
      this.charts.update();
      if (this.tab === "charts") this.charts.draw();
      else this.tabs[this.tab].update(true);
    });
  }

  open(tab) {
    this.tab = tab;
    for (const button of document.querySelectorAll("[role=tab]")) {
      const isOpen = button.id === `tab-${tab}`;
      button.setAttribute("aria-selected", isOpen);
      button.tabIndex = isOpen ? 0 : -1;
      byId(button.getAttribute("aria-controls")).hidden = !isOpen;
    }
    byId("settings").hidden = tab !== "charts";
    history.replaceState(null, "", `#${tab}`);
    this.changed();
  }

  listen() {
    const tabs = [...document.querySelectorAll("[role=tab]")];
    tabs.forEach((button, at) => {
      const name = button.id.slice("tab-".length);
      button.onclick = () => this.open(name);
      button.onkeydown = ({ key }) => {
        const by = { ArrowRight: 1, ArrowLeft: tabs.length - 1 }[key];
        if (!by) return;
        const next = tabs[(at + by) % tabs.length];
        next.focus();
        next.click();
      };
    });
    setting("x", "value", "step", (value) => {
      this.x = value;
      this.setZoom(null);
    });
    setting("smoothing", "value", "0", (value) => {
      this.smoothing = Number(value);
      byId("smoothing-value").textContent = value;
      this.changed();
    });
    setting("outliers", "checked", false, (value) => {
      this.ignoresOutliers = value;
      this.changed();
    });
    setting("marks", "checked", true, (value) => {
      this.marks = value;
      this.changed();
    });
    const system = matchMedia("(prefers-color-scheme: dark)");
    const paint = (value) => {
      this.isDark = value === "dark" || (value === "auto" && system.matches);
      document.documentElement.dataset.theme = this.isDark ? "dark" : "light";
      this.changed();
    };
    setting("theme", "value", "auto", paint);
    system.onchange = () => paint(byId("theme").value);
    byId("reset").onclick = () => this.setZoom(null);
    // On a narrow screen the charts are nearer without the settings.
    byId("settings").open = window.innerWidth > 760;
    const wanted = location.hash.slice(1);
    if (wanted in this.tabs) this.open(wanted);
  }
}

/** A setting that the browser remembers. */
function setting(id, property, usual, apply) {
  const element = byId(id);
  let kept = null;
  try {
    kept = JSON.parse(localStorage.getItem(`watch ${id}`));
  } catch {
    // Without storage, settings last as long as the page.
  }
  element[property] = kept ?? usual;
  element.oninput = () => {
    apply(element[property]);
    try {
      localStorage.setItem(`watch ${id}`, JSON.stringify(element[property]));
    } catch {
      // As above.
    }
  };
  apply(element[property]);
}

function toggle(set, item) {
  if (!set.delete(item)) set.add(item);
}

new View();
