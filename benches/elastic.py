#!/usr/bin/env python3
"""How long a run takes to train on without a host that is lost, and to take it in when it is back.

    elastic.py CONFIG [--set KEY=VALUE].. [--megaburn './run megaburn'] [--save]
    elastic.py configs/llama-tiny.toml --device cpu --set data.path=text.txt    # a trial without GPUs

Two launchers with a rank each are two hosts on this one: NCCL takes their ranks for ranks of different hosts, and both use the same GPU
unless --gpus is 2. Checkpoints are in the memory of the hosts, with copies on the other one. The second host is lost twice:

    kill      SIGKILL to its launcher and its rank
    silent    SIGSTOP to both, so that it gives no sign of life

Each time its folder is removed, and after three seconds its launcher is started again. Measured from the fault, or from that start: until
metrics.jsonl has a new start, and until it has a step that the run had not made.

Writes OUT/elastic.md, with --save also a section on top of benches/results/restarts.md."""

import argparse, json, os, pathlib, shlex, shutil, signal, socket, subprocess, sys, tempfile, time

from metrics import metrics_lines
from section import facts, output, write


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def memory():
    """MiB in use on the first GPU; nothing without GPUs."""
    try:
        return output(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]).split()[0]
    except (FileNotFoundError, IndexError):
        return ""


class Job:
    def __init__(self, args, folder):
        self.args, self.folder, self.run = args, folder, folder / "run"
        self.memory = pathlib.Path(tempfile.mkdtemp(prefix="megaburn-elastic-", dir="/dev/shm"))
        self.ports = [free_port(), free_port()]
        self.hosts = {}
        for node in (0, 1):
            self.start(node)

    def start(self, node):
        env = dict(os.environ, MEGABURN_HOST=f"host-{node}", NCCL_HOSTID=f"host-{node}", NCCL_SOCKET_IFNAME="lo")
        if self.args.device != "cpu":
            env["CUDA_VISIBLE_DEVICES"] = str(node % self.args.gpus)
        own = [f"run.dir={json.dumps(str(self.run))}", f"train.local_checkpoint_dir={json.dumps(str(self.memory) + '/{host}')}",
               "train.checkpoint_interval=10", "train.log_interval=1", "train.steps=1000000", "train.eval_interval=0",
               f"train.timeout_seconds={self.args.timeout_seconds}", "generate.tokens=0"]
        launch = ["launch", "--nproc", 1, "--nnodes", 2, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", self.ports[0],
                  "--agent-port", self.ports[1], "--job-token", "of-this-measurement", "--restarts", 100, "--min-nnodes", 1, "--"]
        train = ["train", "--config", self.args.config, "--layout", "tp1"]
        train += ["--device", self.args.device] if self.args.device else []
        train += [word for one in self.args.set + own for word in ("--set", one)]
        command = [str(word) for word in [*self.args.megaburn, *launch, *self.args.megaburn, *train]]
        with open(self.folder / f"host-{node}.log", "a") as log:
            self.hosts[node] = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def signal(self, node, number):
        """Signals the launcher of a host and what it has started, which has groups of its own."""
        mark = f"MEGABURN_HOST=host-{node}".encode()
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                is_own = str(self.run).encode() in (process / "cmdline").read_bytes()
                if is_own and mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), number)
            except OSError:
                pass

    def lines(self):
        return metrics_lines(self.run)

    def starts(self):
        return [(line["layout"], line["from_step"]) for line in self.lines() if "start" in line]

    def steps(self):
        return [line["step"] for line in self.lines() if "loss" in line]

    def wait(self, what, condition, seconds=120):
        """Seconds until the condition holds."""
        begun = time.monotonic()
        while not condition():
            if self.hosts[0].poll() is not None or time.monotonic() - begun > seconds:
                sys.exit(f"elastic.py: no {what}: starts {self.starts()}, step {max(self.steps(), default=0)}; logs are in OUT")
            time.sleep(0.05)
        return time.monotonic() - begun

    def lose(self, kind):
        """The row of a host that is lost, and of its return."""
        starts, step = len(self.starts()), max(self.steps())
        self.signal(1, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        rows = [self.row(kind, starts, step)]
        self.signal(1, signal.SIGKILL)
        self.hosts[1].wait()
        shutil.rmtree(self.memory / "host-1", ignore_errors=True)
        time.sleep(3)
        starts, step = len(self.starts()), max(self.steps())
        self.start(1)
        rows.append(self.row(f"back after {kind}", starts, step))
        time.sleep(3)
        return rows

    def row(self, what, starts, step):
        new_start = self.wait("new start", lambda: len(self.starts()) > starts)
        new_step = new_start + self.wait("new step", lambda: max(self.steps()) > max(step, self.starts()[-1][1]))
        layout, resumed = self.starts()[-1]
        row = f"| {what} | {layout} | {new_start:.1f} | {new_step:.1f} | {max(0, step - resumed)} | {memory()} |"
        print(row, flush=True)
        return row

    def end(self):
        if 0 in self.hosts and self.hosts[0].poll() is None:
            self.hosts[0].send_signal(signal.SIGTERM)
        for node, process in self.hosts.items():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                self.signal(node, signal.SIGKILL)
        shutil.rmtree(self.memory, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--gpus", type=int, default=1, help="2: each host has a GPU of its own")
    parser.add_argument("--device", help="as in `megaburn train`")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--megaburn", type=shlex.split, default=["./run", "megaburn"])
    parser.add_argument("--timeout-seconds", type=int, default=15, help="`train.timeout_seconds`")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/elastic"))
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    head = ["| the second host | layout | new start, s | new step, s | steps again | MiB of the GPU |", "|---|---|---:|---:|---:|---:|"]
    print("\n".join(head), flush=True)
    with tempfile.TemporaryDirectory(prefix="megaburn-elastic-") as folder:
        job = Job(args, pathlib.Path(folder))
        try:
            job.wait("first steps", lambda: max(job.steps(), default=0) >= 15)
            rows = [row for kind in ("kill", "silent") for row in job.lose(kind)]
        finally:
            job.end()
            for log in pathlib.Path(folder).glob("host-*.log"):
                (args.out / log.name).write_text(log.read_text())
        steps = job.steps()
        codes = [process.returncode for process in job.hosts.values()]
    once = "once and in order" if steps == list(range(1, len(steps) + 1)) else "NOT once and in order"
    rows.append(f"\nmetrics.jsonl has the steps 1 to {max(steps)} {once}; the launchers ended with {codes}.")
    text = "\n".join(head + rows) + "\n\n" + facts(2, args.device)
    write(args, "elastic", "restarts", "a lost host of two", text)


if __name__ == "__main__":
    main()
