#!/usr/bin/env python3
"""How long a run takes to come back after a fault, and whether its GPUs are free in between.

    restarts.py CONFIG --gpus 2 [--set KEY=VALUE].. [--megaburn './run megaburn'] [--save]
    restarts.py configs/llama-tiny.toml --gpus 2 --device cpu --set data.path=text.txt    # a trial without GPUs

Starts CONFIG under `megaburn launch --restarts` with a checkpoint every ten steps, and makes one fault after the other:

    kill     SIGKILL to the last rank
    stop     SIGSTOP to the last rank, so that the others wait in a collective until `train.timeout_seconds` (15)
    abort    SIGABRT to the last rank, as a broken invariant of a library ends it
    memory   SIGKILL to the last rank; while the ranks are gone, another process takes the memory of the last GPU, so that the next
             start runs out of memory, until that process ends

Measured from the fault, or from the end of the process that takes the memory: until the old ranks are gone, until metrics.jsonl has a
new start, and until it has a step that the run had not made. Memory is what nvidia-smi says of the fullest GPU: before the fault, and
the least until the next start. "Steps again" are those since the checkpoint, which are made again; the losses of all\nsteps so far are compared.

Writes OUT/restarts.md, with --save also a section on top of benches/results/restarts.md."""

import argparse, json, os, pathlib, shlex, signal, subprocess, sys, tempfile, time

from metrics import metrics_lines
from section import facts, output, write

# Takes all free memory of a GPU with the driver's own calls, and waits.
TAKE_MEMORY = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
context, device, pointer = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), int(sys.argv[1])) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
size = 1 << 32
while size >= 1 << 24:
    if cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) != 0:
        size //= 2
print("taken", flush=True)
time.sleep(600)
"""


def memory():
    """MiB in use on the fullest GPU; None without GPUs."""
    try:
        lines = output(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]).split()
    except FileNotFoundError:
        return None
    return max(map(int, lines)) if lines else None


class Run:
    def __init__(self, args, folder):
        self.folder = folder / "run"
        own = [f"run.dir={json.dumps(str(self.folder))}", "train.eval_interval=0", "train.checkpoint_interval=10",
               "train.log_interval=1", "train.steps=1000000", f"train.timeout_seconds={args.timeout_seconds}", "generate.tokens=0"]
        train = [*args.megaburn, "train", "--config", args.config, "--layout", args.layout or f"dp{args.gpus}"]
        train += ["--device", args.device] if args.device else []
        train += [word for one in args.set + own for word in ("--set", one)]
        command = [*args.megaburn, "launch", "--nproc", args.gpus, "--restarts", 100, *args.launch, "--", *train]
        self.command = [str(word) for word in command]
        self.log = open(folder / "log", "w")
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                                        start_new_session=True)

    def lines(self):
        return metrics_lines(self.folder)

    def progress(self):
        """The number of starts and the last step."""
        lines = self.lines()
        return sum("start" in line for line in lines), max(self.losses(), default=0)

    def losses(self):
        return {line["step"]: line["loss"] for line in self.lines() if "loss" in line}

    def wait(self, what, condition, seconds=180):
        until = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                sys.exit(f"restarts.py: the launcher ended while waiting for {what}; see {self.log.name}")
            if time.monotonic() > until:
                sys.exit(f"restarts.py: {what} did not happen in {seconds} s; see {self.log.name}")
            time.sleep(0.05)

    def ranks(self):
        """The processes of the ranks by their number."""
        found = {}
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes()
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            rank = next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)
            if rank is not None and state != "Z" and str(self.folder).encode() in command:
                found[rank] = int(folder.name)
        return found

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def fault(run, name, args):
    """Makes a fault and returns the row of it."""
    starts, _ = run.progress()
    # In the middle between two checkpoints, so that some steps are lost.
    run.wait("a step between two checkpoints", lambda: run.progress()[1] % 10 == 5)
    before, ranks, losses = memory(), run.ranks(), run.losses()
    step = max(losses)
    last = ranks[max(ranks)]
    os.kill(last, {"stop": signal.SIGSTOP, "abort": signal.SIGABRT}.get(name, signal.SIGKILL))
    begun = time.monotonic()
    least = [before]
    stays = "--restart-in-place" in args.launch

    def gone():
        if before is not None:
            least.append(memory())
        # In place, the other ranks keep their processes.
        return not any(map(alive, [last] if stays else ranks.values()))

    run.wait("the end of the old ranks", gone)
    of_ranks = time.monotonic() - begun
    if name == "memory":
        taker = subprocess.Popen([sys.executable, "-c", TAKE_MEMORY, str(args.gpus - 1)], stdout=subprocess.PIPE, text=True)
        taker.stdout.readline()
        marks = pathlib.Path(run.log.name).read_text().lower().count("out of memory")
        run.wait("a start that runs out of memory",
                 lambda: pathlib.Path(run.log.name).read_text().lower().count("out of memory") > marks)
        taker.kill()
        taker.wait()
        begun = time.monotonic()

    def started():
        if before is not None:
            least.append(memory())
        return run.progress()[0] > starts

    run.wait("a new start", started)
    new_start = time.monotonic() - begun
    run.wait("a new step", lambda: run.progress()[1] > step)
    new_step = time.monotonic() - begun
    redone = run.losses()
    differ = [abs(redone[of] - loss) for of, loss in losses.items() if of in redone]
    resumed = next((line["from_step"] for line in reversed(run.lines()) if "start" in line), 0)
    cells = [name, f"{of_ranks:.1f}", f"{new_start:.1f}", f"{new_step:.1f}", step - resumed, f"{max(differ):.1e}",
             "" if before is None else f"{before / 1024:.1f}", "" if before is None else f"{min(least) / 1024:.1f}"]
    row = "| " + " | ".join(map(str, cells)) + " |"
    print(row, flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--gpus", type=int, default=2, help="ranks")
    parser.add_argument("--layout", help="default: dpGPUS")
    parser.add_argument("--device", help="as in `megaburn train`")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--launch", type=shlex.split, default=[], metavar="FLAGS", help="more flags of `megaburn launch`")
    parser.add_argument("--megaburn", type=shlex.split, default=["./run", "megaburn"])
    parser.add_argument("--faults", default="kill,stop,abort,memory", type=lambda text: text.split(","))
    parser.add_argument("--timeout-seconds", type=int, default=15, help="`train.timeout_seconds`")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/restarts"))
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.device == "cpu":
        args.faults = [name for name in args.faults if name != "memory"]
    head = ["| fault | old ranks gone, s | new start, s | new step, s | steps again | their losses differ by | GiB before | GiB least |",
            "|---|---:|---:|---:|---:|---:|---:|---:|"]
    print("\n".join(head), flush=True)
    with tempfile.TemporaryDirectory(prefix="megaburn-restarts-") as folder:
        begun = time.monotonic()
        run = Run(args, pathlib.Path(folder))
        try:
            run.wait("the first steps", lambda: run.progress()[1] >= 1)
            first = time.monotonic() - begun
            rows = [fault(run, name, args) for name in args.faults]
        finally:
            run.end()
            (args.out / "log").write_text((pathlib.Path(folder) / "log").read_text())
    text = f"The first start took {first:.1f} s until its first step.\n\n" + "\n".join(head + rows)
    write(args, "restarts", "restarts", f"restarts on {args.gpus} GPUs", f"{text}\n\n{facts(args.gpus, args.device)}")


if __name__ == "__main__":
    main()
