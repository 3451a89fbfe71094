#!/usr/bin/env python3
"""Loss curves of a tiny byte-level Llama in every recipe of `[precision]`, on the CPU's exact emulation.

    cargo build --release --bins
    fp8_curves_cpu.py --data text.txt --out runs/fp8_cpu [--megaburn target/release/megaburn] [--recipes bf16,nvfp4]
        [--seeds 1,2] [--steps 5000] [--save]

All recipes of one seed begin with the same weights and read the same batches; parameters and activations are bf16, and
AdamW updates f32 masters. Each run writes OUT/RECIPE-SEED.jsonl; a run whose file is there is not repeated, and the
report is of all files, so that a list can be run in several calls. Only the embedding and the output projection are
not quantised.

Writes OUT/fp8_curves_cpu.md, with --save also a section on top of benches/results/fp8_curves.md."""

import argparse, collections, datetime, json, os, pathlib, platform, subprocess, sys

RECIPES = "bf16,tensorwise,delayed,blockwise,mxfp8,nvfp4"
SETTINGS = {
    "run.device": "cpu", "model.family": "llama", "model.layers": 2, "model.hidden": 128, "model.ffn": 384, "model.heads": 4,
    "model.kv_heads": 2, "data.seq_len": 64, "train.dtype": "bf16", "train.global_batch": 4, "train.micro_batch": 4,
    "train.eval_interval": 0, "train.checkpoint_interval": 0, "train.log_interval": 1000, "optimizer.lr": 1e-3,
    "optimizer.min_lr": 1e-4, "optimizer.warmup_steps": 200, "optimizer.weight_decay": 0.1, "optimizer.clip_grad": 1.0,
    "generate.tokens": 0,
}
# Settings of a recipe besides its name, as published for it.
OF_RECIPE = {"nvfp4": {"precision.stochastic_rounding": "true", "precision.random_hadamard": "true", "precision.two_dimensional_weights": "true"}}
# Steps whose mean loss is compared.
LAST = 500


def run(recipe, seed, args):
    folder = args.out / f"run-{recipe}-{seed}"
    settings = SETTINGS | OF_RECIPE.get(recipe, {}) | {"run.dir": folder, "run.seed": seed, "precision.recipe": recipe}
    command = [args.megaburn, "train", "--data", args.data, "--layout", "tp1", "--steps", args.steps, "--fresh"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with open(args.out / f"{recipe}-{seed}.log", "w") as log:
        subprocess.run([str(word) for word in command], check=True, stdout=log, stderr=subprocess.STDOUT,
                       env=os.environ | {"RAYON_NUM_THREADS": "1"})
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def report(curves, args):
    def mean(curve, end):
        return sum(line["loss"] for line in curve[end - LAST : end]) / LAST

    steps = min(map(len, curves.values()))
    ends = [steps * part // 4 for part in (1, 2, 3, 4)]
    seeds = sorted({seed for _, seed in curves})
    text = ["| recipe | seed | " + " | ".join(f"{LAST} steps to {end}" for end in ends) + " | last, from bf16 |",
            "|---|---:|" + "---:|" * (len(ends) + 1)]
    apart = collections.defaultdict(list)
    for recipe in RECIPES.split(","):
        for seed in seeds:
            curve, base = curves.get((recipe, seed)), curves.get(("bf16", seed))
            if not curve:
                continue
            off = ""
            if base and recipe != "bf16":
                apart[recipe].append(mean(curve, steps) / mean(base, steps) - 1)
                off = f"{apart[recipe][-1]:+.2%}"
            losses = " | ".join(f"{mean(curve, end):.4f}" for end in ends)
            text.append(f"| {recipe} | {seed} | {losses} | {off} |")
    if len(seeds) > 1:
        text += ["", "Over all seeds: " + ", ".join(f"{recipe} {sum(all) / len(all):+.2%}" for recipe, all in apart.items()) + "."]
    git = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, cwd=pathlib.Path(__file__).parent)
    facts = {
        "machine": f"{os.cpu_count()} cores, {platform.system()}; exact emulation on the CPU",
        "load": "nothing here is a time",
        "commit": git.stdout.strip() or "unknown",
        "command": f"`benches/fp8_curves_cpu.py --data {args.data.name} --steps {args.steps} --seeds {args.seeds}`",
        "versions": "burn 0.22.1",
    }
    return "\n".join(f"- {key}: {value}" for key, value in facts.items()) + "\n\n" + "\n".join(text) + "\n"


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", type=pathlib.Path, required=True)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--megaburn", default="target/release/megaburn")
    ap.add_argument("--recipes", default=RECIPES)
    ap.add_argument("--seeds", default="1")
    ap.add_argument("--steps", type=int, default=5000)
    ap.add_argument("--save", action="store_true")
    args = ap.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in map(int, args.seeds.split(",")):
        for recipe in args.recipes.split(","):
            path = args.out / f"{recipe}-{seed}.jsonl"
            if not path.exists():
                curve = run(recipe, seed, args)
                path.write_text("".join(json.dumps(line) + "\n" for line in curve))
                print(f"{recipe}, seed {seed}: loss {curve[-1]['loss']:.4f}", file=sys.stderr, flush=True)
    curves = {}
    for path in args.out.glob("*-*.jsonl"):
        recipe, seed = path.stem.rsplit("-", 1)
        curves[recipe, int(seed)] = [json.loads(line) for line in path.read_text().splitlines()]
    text = f"## fp8_curves on the CPU, {datetime.date.today().isoformat()}\n\n{report(curves, args)}"
    print(text)
    (args.out / "fp8_curves_cpu.md").write_text(text)
    if args.save:
        path = pathlib.Path(__file__).resolve().parent / "results" / "fp8_curves.md"
        known = path.read_text()
        begin = known.index("\n## ") + 1 if "\n## " in known else len(known)
        path.write_text(known[:begin] + f"{text}\n" + known[begin:])


if __name__ == "__main__":
    main()
