// Folders of runs for the test: metrics as `megaburn train` writes them.

import { appendFileSync, mkdirSync, utimesSync, writeFileSync } from "node:fs";
import { join } from "node:path";

/** Random numbers that are the same in each run of the test. */
function randomOf(seed) {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/** The line of a step of a run of `of` steps. */
export function stepLine(step, of, { random = Math.random, lr = 3e-4, experts = 0, loss = null } = {}) {
  const noise = (size) => size * (random() + random() + random() - 1.5);
  const line = {
    step,
    loss: loss ?? 2 + 9 * Math.exp((-12 * step) / of) + noise(0.1),
    grad_norm: 0.5 + Math.abs(noise(0.3)),
    lr: lr * Math.min(1, (50 * step) / of) * (0.5 + 0.5 * Math.cos((Math.PI * step) / of)),
    tokens: 524288,
    tokens_per_second: 420000 + noise(9000),
    tflops: 412 + noise(5),
    memory_bytes: 61e9,
  };
  if (experts > 0) {
    const list = (make) => Array.from({ length: experts }, make);
    line.experts = {
      aux_loss: 1.02 + random() / 50, seq_aux_loss: 0, global_aux_loss: 1.01, z_loss: 0.3, dropped: 0.01 * random(),
      busiest: list(() => 1 + Math.abs(noise(1))), idlest: list(() => Math.max(0, 1 - Math.abs(noise(0.8)))),
    };
  }
  return line;
}

/** Writes the folder of a run, with what `options` say; returns its path. */
export function writeRun(root, name, steps, options = {}) {
  const folder = join(root, name);
  mkdirSync(folder, { recursive: true });
  const random = randomOf(steps + name.length);
  const lines = [{
    start: 1, run_id: "1f", time: "2026-11-28T01:00:00Z", layout: "tp2-dp2-sp", from_step: 0, changes: [],
  }];
  for (let step = 1; step <= steps; step += 1) {
    const line = stepLine(step, options.of ?? steps, { ...options, random });
    if (step === options.spikeAt) line.loss += 4;
    if (step === options.nullAt) line.loss = null;
    if (step === options.skippedAt) line.skipped = true;
    if (step === options.precisionAt) line.precision = precision(random);
    lines.push(line);
    if (step % Math.ceil(steps / 10) === 0) {
      lines.push({ step, eval_loss: 2.05 + 9 * Math.exp((-12 * step) / steps) });
      lines.push({ step, data: "code", eval_loss: 1.4 + 9 * Math.exp((-12 * step) / steps) });
      lines.push({ checkpoint: step, seconds: 12.5, waited_seconds: 0.3, bytes: 8e10 });
    }
    if (step === options.resumeAfter) {
      const changes = [{ key: "optimizer.clip_grad", old: "1.0", new: "0.5" }];
      lines.push({ start: 2, run_id: "1f", time: "2026-11-28T02:00:00Z", layout: "tp4-sp", from_step: step, changes });
    }
  }
  writeFileSync(join(folder, "metrics.jsonl"), lines.map((line) => JSON.stringify(line) + "\n").join(""));
  const state = { state: options.state ?? "finished", step: steps, steps: options.of ?? steps, reason: options.reason ?? null };
  writeFileSync(join(folder, "state.json"), JSON.stringify(state));
  writeFileSync(join(folder, "config.toml"), config(options));
  // An hour ago, so that no run is taken for one that trains.
  const before = Date.now() / 1000 - 3600;
  utimesSync(join(folder, "metrics.jsonl"), before, before);
  return folder;
}

export function append(folder, line) {
  appendFileSync(join(folder, "metrics.jsonl"), typeof line === "string" ? line : JSON.stringify(line) + "\n");
}

function precision(random) {
  const layers = {};
  for (let block = 0; block < 12; block += 1) {
    const lost = (scale) => ({ saturated: 1e-3 * scale * random(), underflowed: 1e-2 * scale * random(), amax: 50 * random() });
    layers[`blocks.${block}.mlp.up`] = { input: lost(1), weight: lost(0.1), gradient: lost(3) };
  }
  const fallback = { layer: "blocks.3.mlp.up", matrix: "input", cause: "saturated", value: 0.02, bound: 0.01, until_step: 900 };
  return { recipe: "delayed", layers, fallbacks: [fallback] };
}

function config({ lr = 3e-4, pp = 1 }) {
  return `[model]
family = "llama"
hidden = 64
ffn = 96
layers = 4
heads = 4
kv_heads = 2

[data]
seq_len = 32

[parallel]
pp = ${pp}
dp = 1

[train]
global_batch = 8
micro_batch = 1

[optimizer]
lr = ${lr}
`;
}
