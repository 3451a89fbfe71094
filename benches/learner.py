#!/usr/bin/env python3
"""Burn's `Learner` on two GPUs: Burn's own strategies next to megaburn's `ParallelTraining`, on the same programs with the
same batches. The programs are those of Burn's examples `mnist` and `text-generation` (the latter of bytes).

    learner.py --mnist FOLDER --text FILE [--bench ./run bench-learner] [--megaburn ./run megaburn] [--save]

FOLDER holds MNIST's four files, unpacked (train-images-idx3-ubyte, ..). Each strategy runs in processes of its own; memory is
the largest that nvidia-smi shows on a GPU during the run, less what was there before. An epoch's time is the difference of a
run of three epochs and a run of one, so that compilation and start do not count.

Writes OUT/learner.md, with --save also a section on top of benches/results/learner.md."""

import argparse, datetime, pathlib, shlex, subprocess, sys, threading, time

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


def run(program, strategy, epochs, args):
    """Seconds, MiB and the losses of a run, or the reason why it failed."""
    folder = args.out / f"{program}-{strategy}-{epochs}"
    data = args.mnist if program == "mnist" else args.text
    command = shlex.split(args.bench) + ["--program", program, "--data", data, "--strategy", strategy, "--epochs", epochs,
                                         "--dir", folder, "--batch", 128 if program == "mnist" else 64]
    if strategy == "parallel":
        command = shlex.split(args.megaburn) + ["launch", "--nproc", 2, "--"] + command
    memory = Memory()
    memory.start()
    try:
        ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return f"it did not end within {args.timeout} s"
    finally:
        memory.ends = True
        memory.join()
    (args.out / f"{program}-{strategy}-{epochs}.log").write_text(ended.stdout + ended.stderr)
    seconds = [line.split("\t")[1] for line in ended.stdout.splitlines() if line.startswith("seconds\t")]
    if ended.returncode or not seconds:
        lines = [line for line in ended.stderr.splitlines() if "panicked" in line or "error" in line.lower()]
        return (lines or ended.stderr.splitlines() or ["no output"])[0][:200]

    def final(split, metric):
        text = (folder / split / f"epoch-{epochs}" / f"{metric}.log").read_text()
        return float(next(line for line in text.splitlines() if line.endswith(",final")).removesuffix(",final"))

    return float(seconds[0]), memory.peak, final("train", "Loss"), final("valid", "Loss")


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
    parser.add_argument("--timeout", type=int, default=200)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = ["| program | strategy | start and first epoch, s | each further epoch, s | GiB a GPU | loss of epoch 3 | validation loss |",
            "|---|---|---:|---:|---:|---:|---:|"]
    for program, data in (("mnist", args.mnist), ("text", args.text)):
        for strategy in args.strategies.split(",") if data else []:
            first, three = (run(program, strategy, epochs, args) for epochs in (1, 3))
            if isinstance(three, str) or isinstance(first, str):
                rows.append(f"| {program} | {STRATEGIES[strategy]} | {three if isinstance(three, str) else first} | | | | |")
            else:
                rows.append(f"| {program} | {STRATEGIES[strategy]} | {first[0]:.1f} | {(three[0] - first[0]) / 2:.2f} | "
                            f"{three[1] / 1024:.2f} | {three[2]:.4f} | {three[3]:.4f} |")
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
