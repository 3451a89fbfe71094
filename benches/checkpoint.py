#!/usr/bin/env python3
"""What saving and loading a checkpoint costs: time, memory and bytes of each rank.

    benches/checkpoint.py memory  [--binary megaburn] [--cases tp1:0,dp4:3,..]   # ranks as processes, on CPUs
    benches/checkpoint.py waiting [--binary megaburn] [--device cuda] [--set K=V ..] [--layout L]

`memory` trains a Llama of 51 million parameters for two steps under each layout and ZeRO stage (`LAYOUT:STAGE`),
saves it and resumes it. It samples the resident memory of each rank's process while the checkpoint's folder has its
temporary name, and while the next start has not done a step.

`waiting` trains the same steps with synchronous and with asynchronous saves, and compares how long training waited for
a save (`waited_seconds` of `metrics.jsonl`), and how long the steps took during a save and otherwise.
"""

import argparse, json, os, pathlib, shutil, subprocess, sys, tempfile, time

MODEL = ["model.hidden=1024", "model.ffn=2816", "model.layers=4", "model.heads=16", "model.kv_heads=8",
         "data.seq_len=16", "train.global_batch=8", "train.micro_batch=1", "train.eval_interval=0",
         "train.log_interval=1", "generate.tokens=0", "train.eval_batches=1", "optimizer.warmup_steps=0"]
EXPERTS = ["model.family=mixtral", "model.experts.num=4", "model.experts.top_k=2", "model.hidden=512"]
CASES = "tp1:0,dp4:0,dp4:1,dp4:2,dp4:3,tp4:0,tp2-dp2:0,tp2-dp2:1,tp2-dp2:3,pp2-dp2:1,dp4-ep2:1"
MIB = 1 << 20


def metrics(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def processes(folder):
    """The ranks' processes by rank: those whose environment names a rank and whose command names the folder."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if str(folder).encode() not in (entry / "cmdline").read_bytes():
                continue
            names = dict(part.split(b"=", 1) for part in (entry / "environ").read_bytes().split(b"\0") if b"=" in part)
            if b"RANK" in names and b"launch" not in (entry / "cmdline").read_bytes().split(b"\0")[1]:
                found[int(names[b"RANK"])] = entry
        except (OSError, IndexError):
            pass
    return found


def resident(process):
    try:
        return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def launched(binary, ranks, args):
    train = [binary, "train", *args]
    command = [binary, "launch", "--nproc", str(ranks), "--", *train]
    environment = dict(os.environ, RAYON_NUM_THREADS="1")
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ended(job):
    _, errors = job.communicate()
    if job.returncode:
        sys.exit(f"megaburn ended with {job.returncode}: {errors[-2000:]}")


def memory(args):
    print("| layout | zero | rank | written, MiB | save, s | resident before, MiB | extra while saving, MiB | start until "
          "loaded, s | resident then, MiB | extra while loading, MiB |\n|---|---|---|---|---|---|---|---|---|---|")
    for case in args.cases.split(","):
        layout, zero = case.split(":")
        ranks = 1
        for part in layout.split("-"):
            if part[:2] in ("tp", "dp", "pp", "cp"):
                ranks *= int(part[2:])
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            run = pathlib.Path(folder) / "run"
            sets = MODEL + (EXPERTS if "ep" in layout else []) + [f"run.dir={run}", f"parallel.zero={zero}"] + args.set
            base = ["--layout", layout] + [word for one in sets for word in ("--set", one)]
            job = launched(args.binary, ranks, base + ["--steps", "2"])
            before, peak = {}, {}
            checkpoints = run / "checkpoints"
            while job.poll() is None:
                writing = checkpoints.exists() and any(".tmp-" in entry.name for entry in checkpoints.iterdir())
                for rank, process in processes(folder).items():
                    now = resident(process)
                    if writing:
                        peak[rank] = max(peak.get(rank, 0), now)
                    elif rank not in peak:
                        before[rank] = now
                time.sleep(0.002)
            ended(job)
            saved = [line for line in metrics(run) if "checkpoint" in line][-1]
            files = {int(file.stem[5:]): file.stat().st_size
                     for file in (checkpoints / "step-00000002").glob("rank-*.safetensors")}

            started = time.time()
            job = launched(args.binary, ranks, base + ["--steps", "3", "--set", "train.checkpoint_interval=0"])
            loaded, top, steps = None, {}, len([line for line in metrics(run) if "loss" in line])
            while job.poll() is None:
                if loaded is None:
                    for rank, process in processes(folder).items():
                        top[rank] = max(top.get(rank, 0), resident(process))
                    if any(line.get("from_step") == 2 for line in metrics(run)[-2:]):
                        loaded = time.time() - started
                        after = {rank: resident(process) for rank, process in processes(folder).items()}
                time.sleep(0.002)
            ended(job)
            for rank in range(ranks):
                extra = max(peak.get(rank, 0) - before.get(rank, 0), 0)
                loading = max(top.get(rank, 0) - after.get(rank, 0), 0)
                print(f"| {layout} | {zero} | {rank} | {files.get(rank, 0) / MIB:.1f} | {saved['seconds']:.2f} | "
                      f"{before.get(rank, 0) / MIB:.0f} | {extra / MIB:.0f} | {loaded or 0:.1f} | "
                      f"{after.get(rank, 0) / MIB:.0f} | {loading / MIB:.0f} |", flush=True)


def waiting(args):
    results = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for kind in ("false", "true"):
            run = pathlib.Path(folder) / kind
            sets = (args.set if args.device == "cuda" else MODEL + args.set) + [
                f"run.dir={run}", f"train.async_save={kind}", f"train.checkpoint_interval={args.interval}"]
            command = [args.binary, "train", "--layout", args.layout, "--device", args.device, "--steps",
                       str(args.steps)] + [word for one in sets for word in ("--set", one)]
            job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            ended(job)
            results[kind] = metrics(run)
            shutil.rmtree(run)
    saves = {kind: [line for line in lines if "checkpoint" in line] for kind, lines in results.items()}
    # The first one allocates memory that later ones use again. The last one is synchronous in both runs, and training
    # that ends waits for the asynchronous one before it.
    sync, asynchronous = saves["false"][1:-1], saves["true"][1:-2]
    if not sync or not asynchronous:
        sys.exit("too few saves: --steps must be more than three times --interval")
    for kind, name in (("false", "synchronous"), ("true", "asynchronous")):
        for line in saves[kind]:
            print(f"{name} run, step {line['checkpoint']}: complete after {line['seconds']:.2f} s, training waited "
                  f"{line['waited_seconds']:.3f} s")
    mean = lambda values: sum(values) / max(len(values), 1)
    blocked = mean([line["seconds"] for line in sync])
    waited = mean([line["waited_seconds"] for line in asynchronous])
    print(f"checkpoint: {sync[0]['bytes'] / 1e9:.2f} GB, {len(sync)} synchronous and {len(asynchronous)} asynchronous")
    print(f"synchronous: training waits {blocked:.3f} s")
    print(f"asynchronous: training waits {waited:.4f} s = {100 * waited / blocked:.2f}% of that; complete after "
          f"{mean([line['seconds'] for line in asynchronous]):.2f} s")
    for kind, name in (("false", "synchronous"), ("true", "asynchronous")):
        steps = [line for line in results[kind] if "loss" in line][2:]
        per_step = sorted(line["tokens"] / line["tokens_per_second"] for line in steps)
        print(f"steps of the {name} run: median {1e3 * per_step[len(per_step) // 2]:.1f} ms, mean "
              f"{1e3 * mean(per_step):.1f} ms, longest {1e3 * per_step[-1]:.1f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "waiting"])
    parser.add_argument("--binary", default="target/release/megaburn")
    parser.add_argument("--dir", help="where the runs are written; default: the system's temporary folder")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--layout", default="dp1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--interval", type=int, default=8)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    {"memory": memory, "waiting": waiting}[args.what](args)


if __name__ == "__main__":
    main()
