#!/usr/bin/env python3
"""Burn's `Learner` on two GPUs: Burn's own strategies next to megaburn's `ParallelTraining`, on the same programs with the
same batches. The programs are those of Burn's examples `mnist` and `text-generation` (the latter of bytes).

    learner.py --mnist FOLDER --text FILE [--bench ./run bench-learner] [--megaburn ./run megaburn] [--save]

FOLDER holds MNIST's four files, unpacked (train-images-idx3-ubyte, ..). Each strategy runs in processes of its own; memory is
the largest that nvidia-smi shows on a GPU during the run, less what was there before. An epoch's time is from the end of the
validation before it to its last step, as Burn's logs were written; the first epoch, in which kernels are compiled and tuned,
does not count.

Writes OUT/learner.md, with --save also a section on top of benches/results/learner.md."""

import argparse, datetime, pathlib, shlex, statistics, subprocess, sys, threading, time

STRATEGIES = {
    "one": "Burn, one GPU", "ddp": "Burn, `ExecutionStrategy::ddp`", "multi": "Burn, `ExecutionStrategy::multi`",
    "parallel": "megaburn, `ParallelTraining`, dp2",
}


def used():
    """MiB in use on each GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]


class Memory(threading.Thread):
    """Watches the largest use of a GPU's memory."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before, self.peak, self.ends = used(), 0, False

    def run(self):
        while not self.ends:
            self.peak = max([self.peak] + [now - before for now, before in zip(used(), self.before)])
            time.sleep(0.2)


def run(program, strategy, args):
    """Seconds of the run and of an epoch, MiB and the losses of the last epoch; or the reason why it failed."""
    folder = args.out / f"{program}-{strategy}"
    data = args.mnist if program == "mnist" else args.text
    command = shlex.split(args.bench) + ["--program", program, "--data", data, "--strategy", strategy, "--epochs", args.epochs,
                                         "--dir", folder, "--batch", 128 if program == "mnist" else 64]
    if args.items:
        command += ["--items", args.items]
    if program == "mnist":
        command += ["--norm", args.norm]
    if args.flush:
        command += ["--flush"]
    if strategy == "parallel":
        command = shlex.split(args.megaburn) + ["launch", "--nproc", 2, "--"] + command
    memory = Memory()
    memory.start()
    try:
        ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired as error:
        (args.out / f"{program}-{strategy}.log").write_bytes((error.stdout or b"") + (error.stderr or b""))
        written = folder / "experiment.log"
        num = written.read_text().count("Iteration") if written.is_file() else 0
        return f"it did not end within {args.timeout} s, after {num} steps of all GPUs"
    finally:
        memory.ends = True
        memory.join()
    (args.out / f"{program}-{strategy}.log").write_text(ended.stdout + ended.stderr)
    seconds = [line.split("\t")[1] for line in ended.stdout.splitlines() if line.startswith("seconds\t")]
    if ended.returncode or not seconds:
        lines = [line for line in ended.stderr.splitlines() if "panicked" in line or "error" in line.lower()]
        return (lines or ended.stderr.splitlines() or ["no output"])[0][:200]

    def log(split, epoch):
        return folder / split / f"epoch-{epoch}" / "Loss.log"

    def final(split):
        lines = [line.split(",") for line in log(split, args.epochs).read_text().splitlines()]
        found = [float(value) for value, *kind in lines if kind == ["final"]]
        # Under `ddp`, a step may be logged after the end of its epoch, and Burn then leaves the last line out.
        counted = [(float(value), float(kind[0]) if kind else 1.0) for value, *kind in lines if kind != ["final"]]
        return found[-1] if found else sum(value * num for value, num in counted) / sum(num for _, num in counted)

    written = [(log("valid", epoch - 1).stat().st_mtime, log("train", epoch).stat().st_mtime) for epoch in range(2, args.epochs + 1)]
    epoch = statistics.median(end - start for start, end in written)
    return float(seconds[0]), epoch, memory.peak, final("train"), final("valid")


def facts():
    """The machine, the commit and the command of a run."""

    def output(*command):
        return subprocess.run(command, capture_output=True, text=True, cwd=here).stdout.strip()

    here = pathlib.Path(__file__).resolve().parent
    bundled = here.parent / "COMMIT"
    commit = bundled.read_text() if bundled.is_file() else output("git", "rev-parse", "HEAD")
    gpus = output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    return "\n".join([f"- machine: {len(gpus)} GPUs, {gpus[0]}", f"- commit: {commit[:12]}", f"- command: `{shlex.join(sys.argv)}`"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path)
    parser.add_argument("--bench", default="./run bench-learner")
    parser.add_argument("--megaburn", default="./run megaburn")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/learner"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--items", type=int, help="only the first items of the training data")
    parser.add_argument("--norm", default="batch", choices=["batch", "group"], help="the norms of mnist")
    parser.add_argument("--flush", action="store_true", help="flush the GPUs' queues while Burn's strategies train")
    parser.add_argument("--timeout", type=int, default=200)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [f"| program | strategy | {args.epochs} epochs, s | an epoch, s | GiB a GPU | loss of the last epoch | validation loss |",
            "|---|---|---:|---:|---:|---:|---:|"]
    for program, data in (("mnist", args.mnist), ("text", args.text)):
        for strategy in args.strategies.split(",") if data else []:
            found = run(program, strategy, args)
            if isinstance(found, str):
                rows.append(f"| {program} | {STRATEGIES[strategy]} | {found} | | | | |")
            else:
                seconds, epoch, mib, loss, valid = found
                rows.append(f"| {program} | {STRATEGIES[strategy]} | {seconds:.1f} | {epoch:.2f} | {mib / 1024:.2f} | {loss:.4f} | {valid:.4f} |")
            print(rows[-1], flush=True)
    section = f"## learner, {datetime.date.today()}\n\n{facts()}\n\n" + "\n".join(rows) + "\n"
    (args.out / "learner.md").write_text(section)
    print(section)
    if args.save:
        results = pathlib.Path(__file__).parent / "results" / "learner.md"
        head, mark, rest = results.read_text().partition("\n## ")
        results.write_text(head + "\n" + section + mark + rest)


if __name__ == "__main__":
    main()
