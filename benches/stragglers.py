#!/usr/bin/env python3
"""After how many steps a rank is named whose processor, or whose GPU, is slow.

    stragglers.py CONFIG --ranks 4 [--set KEY=VALUE].. [--megaburn './run megaburn'] [--save]
    stragglers.py CONFIG --ranks 2 --slow-gpu --peer-python python3    # a GPU for each rank, PyTorch for the other process
    stragglers.py configs/llama-tiny.toml --ranks 3 --device cpu --set data.path=text.txt    # a trial without GPUs

All ranks share a GPU. After 100 steps, in which no rank may be named, one of them has to share a processor core with three busy loops.
With --slow-gpu each rank has a GPU of its own, and the last one has to share it with a process that multiplies small matrices in between.

Writes OUT/stragglers.md, with --save also a section on top of benches/results/logging_cost.md."""

import argparse, json, os, pathlib, shlex, signal, subprocess, sys, tempfile, time

from metrics import metrics_lines
from section import facts, write

STEPS = 100
BUSY = 3


# A kernel of a fraction of a millisecond, and a pause.
OTHER = """import sys, time, torch
a = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16)
while True:
    torch.mm(a, a)
    torch.cuda.synchronize()
    time.sleep(float(sys.argv[1]))"""


def last(run):
    return max((line["step"] for line in metrics_lines(run) if "loss" in line), default=0)


def named(run):
    return [line for line in metrics_lines(run) if "straggler" in line]


def process_of(rank, run):
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in words and str(run).encode() in (process / "cmdline").read_bytes():
                return int(process.name)
        except OSError:
            pass
    sys.exit(f"stragglers.py: rank {rank} has no process")


def wait(what, processes, condition, seconds):
    until = time.monotonic() + seconds
    while not condition():
        if any(process.poll() is not None for process in processes):
            sys.exit(f"stragglers.py: no {what}: a process has ended; the log is in OUT")
        if time.monotonic() > until:
            sys.exit(f"stragglers.py: no {what} in {seconds} s; the log is in OUT")
        time.sleep(0.05)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", help="as in `megaburn train`")
    parser.add_argument("--slow-gpu", action="store_true")
    parser.add_argument("--peer-python", default="python3")
    parser.add_argument("--pause", default="0.0002", help="seconds between the kernels of the other process")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--megaburn", type=shlex.split, default=["./run", "megaburn"])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/stragglers"))
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    slow = args.ranks - 1
    with tempfile.TemporaryDirectory(prefix="megaburn-stragglers-") as folder:
        run = pathlib.Path(folder) / "run"
        own = [f"run.dir={json.dumps(str(run))}", "train.log_interval=1", "train.steps=1000000", "train.eval_interval=0",
               "train.checkpoint_interval=0", "train.checkpoint_interval_minutes=0", "generate.tokens=0"]
        shared = [] if args.device == "cpu" or args.slow_gpu else ["--ranks-per-gpu", args.ranks]
        command = [*args.megaburn, "launch", "--nproc", args.ranks, *shared, "--", *args.megaburn, "train", "--config", args.config]
        command += ["--layout", f"dp{args.ranks}"] + (["--device", args.device] if args.device else [])
        command += [word for one in args.set + own for word in ("--set", one)]
        with open(args.out / "log", "w") as log:
            launcher = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        busy = []
        try:
            wait(f"step {STEPS}", [launcher], lambda: last(run) >= STEPS, 300)
            before, first = named(run), last(run)
            if args.slow_gpu:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
                gpu = visible.split(",")[slow] if visible else str(slow)
                busy = [subprocess.Popen([args.peer_python, "-c", OTHER, args.pause], env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu})]
            else:
                core = str(max(os.sched_getaffinity(0)))
                subprocess.run(["taskset", "-a", "-cp", core, str(process_of(slow, run))], stdout=subprocess.DEVNULL, check=True)
                busy = [subprocess.Popen(["taskset", "-c", core, "sh", "-c", "while :; do :; done"]) for _ in range(BUSY)]
            wait("straggler", [launcher, *busy], lambda: len(named(run)) > len(before), 300)
            found = named(run)[len(before)]
        finally:
            for loop in busy:
                loop.kill()
            launcher.send_signal(signal.SIGTERM)
            try:
                launcher.wait(60)
            except subprocess.TimeoutExpired:
                launcher.kill()
    rows = ["| named before | slow rank | from step | named rank | at step | section | slower |", "|---:|---:|---:|---:|---:|---|---:|",
            f"| {len(before)} | {slow} | {first} | {found['rank']} | {found['straggler']} | {found['section']} | {found['slower']:.0%} |"]
    part = "GPU" if args.slow_gpu else "processor"
    write(args, "stragglers", "logging_cost", f"a rank of {args.ranks} with a slow {part}", "\n".join(rows) + "\n\n" + facts(args.ranks, args.device))


if __name__ == "__main__":
    main()
