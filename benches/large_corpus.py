"""Trains on a data set of many GB and on a small text, and compares start, memory and speed.

    python3 benches/large_corpus.py --megaburn target/release/megaburn --dir /tmp/large --gigabytes 20

It writes DIR/corpus.bin and corpus.idx (random bytes as tokens of 2 bytes, documents of 200 to 800 tokens), which
later calls reuse. Each row is a run of its own: the time from the start of the process to its first step, the largest
resident memory of the process, and the median time of a step.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import struct
import subprocess
import time
from array import array
from pathlib import Path

STEPS = 60
BLOCK = 1 << 24  # tokens


def write_corpus(prefix, num_tokens):
    draw = random.Random(29)
    block = array("H", (byte for byte in draw.randbytes(BLOCK)))
    lengths = array("i")
    left = num_tokens
    while left:
        lengths.append(min(left, draw.randrange(200, 800)))
        left -= lengths[-1]
    with open(f"{prefix}.bin", "wb") as file:
        left = num_tokens
        while left:
            file.write(block[: min(left, BLOCK)].tobytes())
            left -= min(left, BLOCK)
    with open(f"{prefix}.idx", "wb") as file:
        num = len(lengths)
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, num, num + 1))
        file.write(lengths.tobytes())
        position, pointers = 0, array("q")
        for length in lengths:
            pointers.append(position)
            position += 2 * length
        file.write(pointers.tobytes())
        file.write(array("q", range(num + 1)).tobytes())


def median_step(run):
    """The tokens per second of the last two thirds of the steps, as milliseconds of a step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    steps = [step for step in steps if "tokens_per_second" in step]
    steps = steps[len(steps) // 3 :]
    return statistics.median(1000 * step["tokens"] / step["tokens_per_second"] for step in steps)


def train(megaburn, run, args, num_ranks, num_steps=STEPS):
    shutil.rmtree(run, ignore_errors=True)
    command = [megaburn, "train", "--steps", str(num_steps), "--set", f"run.dir={run}"]
    command += ["--set", "train.eval_interval=0", "--set", "generate.tokens=0"]
    command += ["--set", "data.validation_fraction=0", *args]
    if num_ranks > 1:
        command = [megaburn, "launch", "--nproc", str(num_ranks), "--", *command]
    start = time.monotonic()
    environment = dict(os.environ, RAYON_NUM_THREADS="1")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    first = None
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        if first is None and metrics.exists() and '"loss"' in metrics.read_text():
            first = time.monotonic() - start
        time.sleep(0.005)
    assert process.returncode == 0, f"{command} ended with {process.returncode}"
    return first


def peak(command_run):
    """Runs a function in a child, and returns its result and the largest resident memory of a process below it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        import resource

        result = command_run()
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        os.write(write, json.dumps([result, used]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


def compare_steps(megaburn, directory, corpus, num_pairs):
    """Alternates runs on generated tokens and on the data set, so that both see the same state of the machine."""
    print("\n| pair | a step on generated tokens | a step on the data set | ratio |\n|---:|---:|---:|---:|")
    ratios = []
    for pair in range(num_pairs):
        times = []
        for data in ("synthetic:markov", str(corpus)):
            run = directory / "run"
            train(megaburn, run, ["--data", data], 1, 6 * STEPS)
            times.append(median_step(run))
        ratios.append(times[1] / times[0])
        print(f"| {pair + 1} | {times[0]:.2f} ms | {times[1]:.2f} ms | {ratios[-1]:.4f} |", flush=True)
    print(f"\nmedian ratio {statistics.median(ratios):.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megaburn", default="target/release/megaburn")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--pairs", type=int, default=7, help="pairs of runs whose steps are compared")
    args = parser.parse_args()
    megaburn = str(Path(args.megaburn).resolve())
    args.dir.mkdir(parents=True, exist_ok=True)
    corpus = args.dir / "corpus"
    num_tokens = int(args.gigabytes * 5e8)
    if not Path(f"{corpus}.bin").exists() or os.path.getsize(f"{corpus}.bin") != 2 * num_tokens:
        write_corpus(corpus, num_tokens)
    text = args.dir / "small.txt"
    draw = random.Random(1)
    text.write_text("".join(chr(draw.randrange(128)) for _ in range(2_000_000)))
    cache = args.dir / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    megatron = ["--data", str(corpus), "--set", "data.order=megatron", "--set", f"data.cache_dir={cache}"]
    rows = [
        ("text of 2 MB in memory", ["--data", str(text)], 1),
        ("data set", ["--data", str(corpus)], 1),
        ("text of 2 MB in memory, again", ["--data", str(text)], 1),
        ("data set, again", ["--data", str(corpus)], 1),
        ("data set, Megatron-LM's order, index is built", megatron, 1),
        ("data set, Megatron-LM's order, index is there", megatron, 1),
        ("text, 8 rank processes", ["--data", str(text), "--layout", "dp8", "--set", "train.micro_batch=1"], 8),
        ("data set, 8 rank processes", ["--data", str(corpus), "--layout", "dp8", "--set", "train.micro_batch=1"], 8),
    ]
    sizes = [os.path.getsize(f"{corpus}{ending}") / 1e9 for ending in (".bin", ".idx")]
    print(f"corpus.bin has {sizes[0]:.1f} GB, corpus.idx {sizes[1]:.2f} GB\n")
    print("| data | first step after | largest memory of a process | a step |\n|---|---|---|---|")
    for name, extra, num_ranks in rows:
        run = args.dir / "run"
        first, memory = peak(lambda: train(megaburn, run, extra, num_ranks))
        print(f"| {name} | {first:.2f} s | {memory / 1024:.0f} MiB | {median_step(run):.1f} ms |", flush=True)
    compare_steps(megaburn, args.dir, corpus, args.pairs)


if __name__ == "__main__":
    main()
