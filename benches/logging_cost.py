#!/usr/bin/env python3
"""What logging costs: steps of a run with all logs next to those of a run with none.

    logging_cost.py CONFIG --gpus 2 [--set KEY=VALUE].. [--megaburn './run megaburn'] [--save]
    logging_cost.py configs/llama-tiny.toml --gpus 1 --device cpu --set data.path=text.txt    # a trial without GPUs

`none` prints a line of the console at the end only. `all` has a line for every step, TensorBoard, CSV, Weights & Biases, Prometheus with a
reader that asks every second, and norms of parameters and counts of zeros. `logs` is `all` without the last two, which are computed
on the GPUs. `watch` has no logs, but compares the time of ranks and reads the health of GPUs, as is the default; the others do not.
`compare` compares the state of the ranks after every tenth step, `save` saves it asynchronously, and `save_compared` does both, as a run
with `train.check_replicas_interval` does whenever it saves.
Runs alternate. A run's figure is the time from the end of its step WARM_UP to the end of its last one, by `wall_time` in metrics.jsonl,
which every run writes.

Writes OUT/logging_cost.md, with --save also a section on top of benches/results/logging_cost.md."""

import argparse, json, pathlib, shlex, statistics, subprocess, sys, tempfile, threading, urllib.request

from section import facts, write

WARM_UP = 10
LOGS = ["train.log_interval=1", "log.tensorboard=true", "log.csv=true", "log.wandb=true", "log.prometheus_port=9423"]
UNWATCHED = ["train.straggler_interval=0", "train.gpu_health_interval=0"]
SAVE = ["train.checkpoint_interval=10", "train.async_save=true"]
KINDS = {"none": UNWATCHED + ["train.log_interval=1000000"], "logs": UNWATCHED + LOGS,
         "all": UNWATCHED + LOGS + ["train.log_params_norm=true", "train.log_num_zeros=true"],
         "watch": ["train.log_interval=1000000"],
         "compare": UNWATCHED + ["train.log_interval=1000000", "train.check_replicas_interval=10"],
         "save": UNWATCHED + ["train.log_interval=1000000", *SAVE],
         "save_compared": UNWATCHED + ["train.log_interval=1000000", "train.check_replicas_interval=1000000", *SAVE]}
DEFAULT = ["none", "logs", "all", "watch"]


def read_prometheus(stopped, counts):
    while not stopped.wait(1):
        try:
            counts.append(len(urllib.request.urlopen("http://127.0.0.1:9423/metrics", timeout=1).read()))
        except OSError:
            pass


def measured(args, kind):
    """Milliseconds of a step, and how often Prometheus was read."""
    with tempfile.TemporaryDirectory(prefix="megaburn-logging-") as folder:
        own = [f"run.dir={json.dumps(folder + '/run')}", "train.eval_interval=0", "train.checkpoint_interval=0",
               "train.checkpoint_interval_minutes=0", "generate.tokens=0", f"train.steps={WARM_UP + args.steps}"]
        command = [*args.megaburn, "train", "--config", args.config, "--layout", args.layout or f"dp{args.gpus}"]
        command += ["--device", args.device] if args.device else []
        command += [word for one in args.set + own + KINDS[kind] for word in ("--set", one)]
        stopped, counts = threading.Event(), []
        reader = threading.Thread(target=read_prometheus, args=(stopped, counts))
        if kind in ("logs", "all"):
            reader.start()
        ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        stopped.set()
        if ended.returncode:
            sys.exit(f"logging_cost.py: a run failed: {ended.stderr.strip().splitlines()[-1:]}")
        lines = map(json.loads, (pathlib.Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
        ends = {line["step"]: line["wall_time"] for line in lines if "loss" in line}
        last = max(ends)
        return (ends[last] - ends[WARM_UP]) / (last - WARM_UP) * 1e3, len(counts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--layout", help="default: dpGPUS")
    parser.add_argument("--device", help="as in `megaburn train`")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--megaburn", type=shlex.split, default=["./run", "megaburn"])
    parser.add_argument("--kinds", default=DEFAULT, type=lambda text: text.split(","), help="`none` and others; default: none,logs,all,watch")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/logging_cost"))
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if "none" not in args.kinds or not set(args.kinds) <= set(KINDS):
        parser.error(f"--kinds {','.join(args.kinds)}: choose `none` and others of {', '.join(KINDS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    found = {kind: [] for kind in args.kinds}
    for number in range(args.rounds):
        # The order turns round, so that a machine that warms up does not favour one kind.
        for kind in args.kinds[:: 1 if number % 2 == 0 else -1]:
            ms, reads = measured(args, kind)
            found[kind].append(ms)
            print(f"{kind}: {ms:.2f} ms a step, Prometheus read {reads} times", flush=True)
    least = statistics.median(found["none"])
    table = ["| logs | ms a step, each run | median | more than none |", "|---|---|---:|---:|"]
    for kind, times in found.items():
        median = statistics.median(times)
        table.append(f"| {kind} | {', '.join(f'{ms:.2f}' for ms in times)} | {median:.2f} | {100 * (median / least - 1):+.2f}% |")
    write(args, "logging_cost", "logging_cost", "logging_cost", "\n".join(table) + "\n\n" + facts(args.gpus, args.device))


if __name__ == "__main__":
    main()
