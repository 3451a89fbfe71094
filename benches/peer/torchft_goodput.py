"""The goodput of torchft under the faults of `tests/faults/goodput.rs`, next to the same run without faults.

    python torchft_goodput.py --seconds 3600 --seed 22 --schedule ../results/faults.md --out FOLDER

Needs torch and torchft, no GPU. Two replica groups of one process each train the tiny Llama of `tests/faults/case.rs`
(two micro-batches of one sequence in each group, a wait in each loss) with torchft's Manager, DistributedDataParallel and
ProcessGroupGloo. A supervisor for each group starts a trainer that has ended again at once, and kills one whose thread
gives no sign of life for the timeout (torchelastic's timers can do that; by itself it waits for ever). The lighthouse is
never hit. The schedule is the first table of the file with a second and a fault in its rows; without one it is drawn as
`goodput.rs` draws it, from another generator.

Counted is each step that a group has committed, once, and its samples: those of the groups that took part in it, by
`Manager.num_participants()`. Both are divided by those of the run without faults at the same time."""

import argparse, contextlib, ctypes, hashlib, json, math, os, random, re, signal, socket, subprocess, sys, threading, time
from datetime import timedelta
from pathlib import Path

HIDDEN, HEADS, FFN, LAYERS, VOCAB, SEQ_LEN, MICRO_BATCHES, GROUPS = 32, 4, 64, 2, 260, 32, 2, 2
LR, MIN_LR, WARMUP, DECAY = 3e-3, 3e-4, 20, 1000
INTERVAL, BETWEEN, PATIENCE = 5, 120, 90
FAULTS = {
    "a rank is killed": signal.SIGKILL,
    "a rank aborts": signal.SIGABRT,
    "a rank hangs": signal.SIGSTOP,
    "a launcher is killed, and started after 1 s": None,
    "a host is lost, and comes back after 1 s": None,
}


# -- the trainer


def llama():
    import torch, torch.nn as nn, torch.nn.functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN, 1e-5), nn.RMSNorm(HIDDEN, 1e-5)
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
            self.output = nn.Linear(HIDDEN, HIDDEN, bias=False)
            self.gate_up, self.down = nn.Linear(HIDDEN, 2 * FFN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)

        def forward(self, x, cos, sin):
            b, t, _ = x.shape
            q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(self.attention_norm(x)).chunk(3, -1))

            def rotated(y):
                first, second = y.chunk(2, -1)
                return y * cos + torch.cat((-second, first), -1) * sin

            o = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
            x = x + self.output(o.transpose(1, 2).reshape(b, t, -1))
            gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.RMSNorm(HIDDEN, 1e-5)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            nn.init.normal_(self.embedding.weight, 0, 0.02)
            dim = HIDDEN // HEADS
            angles = 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)
            angles = torch.outer(torch.arange(SEQ_LEN), angles).repeat(1, 2)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

        def forward(self, tokens, labels):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = F.linear(self.norm(x), self.embedding.weight)
            return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))

    return Llama()


def learning_rate(step):
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    done = min(1.0, (step - WARMUP) / (DECAY - WARMUP))
    return MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * done)) / 2


def train(args):
    import torch, torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, ProcessGroupGloo

    def sign_of_life():
        while True:
            Path(args.out, f"alive-{args.group}").touch()
            time.sleep(0.3)

    threading.Thread(target=sign_of_life, daemon=True).start()
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    lines = random.Random(1)
    text = "".join(f"line {line}: {lines.getrandbits(64)}\n" for line in range(400)).encode()
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def batch(step, micro):
        sample = (step * GROUPS + args.group) * MICRO_BATCHES + micro
        at = random.Random(sample).randrange(len(text) - SEQ_LEN - 1)
        return text[None, at : at + SEQ_LEN], text[None, at + 1 : at + SEQ_LEN + 1]

    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), LR, (0.9, 0.95), 1e-8, 0.1)
    # A first step before the process joins, so that the other group doesn't wait for its first kernels.
    model(*batch(0, 0)).backward()
    optimizer.zero_grad()

    timeout = timedelta(seconds=args.timeout)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timeout,
        connect_timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"group_{args.group}",
        hostname="127.0.0.1",
    )
    # Checkpoints as in our run, for the case that both groups are gone: each group saves, and reads the newest.
    saved = {}
    for path in Path(args.out).glob("checkpoint-?.pt"):
        found = torch.load(path)
        saved = max(saved, found, key=lambda of: of.get("manager", {}).get("step", -1))
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        manager.load_state_dict(saved["manager"])
    ddp = DistributedDataParallel(manager, model)
    with open(Path(args.out, f"steps-{args.group}.jsonl"), "a", buffering=1) as log:
        while True:
            # As torchft.Optimizer does it: a quorum for each step, and a step only if all is well.
            manager.start_quorum()
            optimizer.zero_grad()
            step = manager.current_step()
            for micro in range(MICRO_BATCHES):
                last = micro == MICRO_BATCHES - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    loss = ddp(*batch(step, micro)) / MICRO_BATCHES
                    time.sleep(args.pause)
                    loss.backward()
            line = {"time": time.time(), "pid": os.getpid()}
            if manager.should_commit():
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(manager.current_step() - 1)
                optimizer.step()
                weights = torch.cat([p.detach().view(-1) for p in model.parameters()]).numpy().tobytes()
                line |= {"step": manager.current_step(), "participants": manager.num_participants()}
                line |= {"batches": manager.batches_committed(), "loss": loss.item() * MICRO_BATCHES}
                line |= {"weights": hashlib.sha1(weights).hexdigest(), "time": time.time()}
                if manager.current_step() % INTERVAL == 0:
                    path = Path(args.out, f"checkpoint-{args.group}.pt")
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state | {"manager": manager.state_dict()}, path.with_suffix(".new"))
                    path.with_suffix(".new").rename(path)
            else:
                line["discarded"] = str(manager.errored() or "not enough groups")[:200]
            log.write(json.dumps(line) + "\n")


# -- the supervisor of a group


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def command(args, role, group, out):
    values = {"role": role, "group": group, "out": out, "timeout": args.timeout, "pause": args.pause}
    return [sys.executable, __file__, *(f"--{name}={value}" for name, value in values.items())]


def supervise(args):
    alive = Path(args.out, f"alive-{args.group}")
    while True:
        alive.unlink(missing_ok=True)
        with open(Path(args.out, f"trainer-{args.group}.log"), "a") as log:
            trainer = subprocess.Popen(
                command(args, "trainer", args.group, args.out), stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        Path(args.out, f"pid-{args.group}").write_text(str(trainer.pid))
        while trainer.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - alive.stat().st_mtime > args.timeout:
                    trainer.kill()
            time.sleep(0.02)


# -- the runs


class Run:
    def __init__(self, args, name):
        self.args, self.out = args, Path(args.out, name)
        self.out.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.environment = os.environ | {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "OMP_NUM_THREADS": "1"}
        # Each step that was committed, with the last line about it; the weights by group.
        self.steps, self.weights, self.read, self.lines = {}, {}, [0] * GROUPS, [[] for _ in range(GROUPS)]
        self.discarded = self.done_again = 0
        milliseconds = str(int(args.heartbeat_timeout * 1000))
        self.lighthouse = self.start(
            [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{port}"]
            + ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", str(int(args.timeout * 1000))]
            + ["--heartbeat_timeout_ms", milliseconds],
            "lighthouse",
        )
        self.supervisors = [self.supervisor(group) for group in range(GROUPS)]

    def start(self, command, name):
        with open(self.out / f"{name}.log", "a") as log:
            return subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, process_group=0, preexec_fn=die_with_parent
            )

    def supervisor(self, group):
        return self.start(command(self.args, "supervisor", group, self.out), f"supervisor-{group}")

    def poll(self):
        for group in range(GROUPS):
            path = self.out / f"steps-{group}.jsonl"
            if not path.exists():
                continue
            with open(path) as file:
                file.seek(self.read[group])
                text = file.read()
            text = text[: text.rfind("\n") + 1]
            self.read[group] += len(text)
            for line in map(json.loads, text.splitlines()):
                if "step" not in line:
                    self.discarded += 1
                    continue
                step = line["step"]
                self.done_again += any(of["step"] == step for of in self.lines[group][-50:])
                self.lines[group].append(line)
                if step not in self.steps or line["time"] > self.steps[step]["time"]:
                    self.steps[step] = line
                self.weights.setdefault(step, {})[group] = line["weights"]

    def last(self, group):
        return self.lines[group][-1] if self.lines[group] else {"step": 0, "participants": 0, "pid": 0, "time": 0}

    def wait(self, what, is_so):
        begun = time.time()
        while True:
            self.poll()
            if is_so():
                return time.time() - begun
            if self.lighthouse.poll() is not None:
                raise SystemExit(f"{what}: the lighthouse has ended")
            if time.time() - begun > PATIENCE:
                return math.inf
            time.sleep(0.02)

    def is_whole(self):
        return all(self.last(group)["participants"] == GROUPS for group in range(GROUPS))

    def pid(self, group):
        return int((self.out / f"pid-{group}").read_text())

    def happen(self, fault, group):
        if FAULTS[fault] is None:
            os.killpg(self.supervisors[group].pid, signal.SIGKILL)
            self.supervisors[group].wait()
            time.sleep(1)
            self.supervisors[group] = self.supervisor(group)
        else:
            os.kill(self.pid(group), FAULTS[fault])

    def counts(self):
        """The number of the last step, and the samples of all."""
        self.poll()
        samples = sum(line["participants"] * MICRO_BATCHES for line in self.steps.values())
        return max(self.steps, default=0), samples

    def end(self):
        for process in [*self.supervisors, self.lighthouse]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def schedule(args):
    if args.schedule:
        rows = []
        for line in Path(args.schedule).read_text().splitlines():
            found = re.match(r"\| *(\d+) *\| *([^|]+?) *\|", line)
            if found and found[2] in FAULTS:
                rows.append((int(found[1]), found[2]))
            elif rows:
                break
        return [row for row in rows if row[0] <= args.seconds]
    draw = random.Random(args.seed)
    seconds = range(0, args.seconds, BETWEEN)
    rows = [(second + 30 + draw.randrange(BETWEEN - 60), draw.choice(list(FAULTS))) for second in seconds]
    return [row for row in rows if row[0] <= args.seconds]


def measure(args):
    from importlib.metadata import distributions

    names = {of.name: of.version for of in distributions() if of.name in ("torch", "torchft", "torchft-nightly")}
    versions = ", ".join(f"{name} {version}" for name, version in sorted(names.items()))
    groups, load = random.Random(args.seed), os.getloadavg()
    with_faults, without = Run(args, "faults"), Run(args, "undisturbed")
    try:
        for run in (with_faults, without):
            if run.wait("the first steps", lambda: run.is_whole() and run.last(0)["step"] >= 2) > PATIENCE:
                raise SystemExit(f"no two steps of both groups within {PATIENCE} s: see {run.out}")
        begun = time.time()
        first = [with_faults.counts(), without.counts()]
        print("| second | fault | group | longest time without a step, s | both groups back after, s |\n|---|---|---|---|---|")
        number = 0
        for second, fault in schedule(args):
            time.sleep(max(0.0, begun + second - time.time()))
            group = groups.randrange(GROUPS)
            with_faults.poll()
            old, at = with_faults.pid(group), time.time()
            with_faults.happen(fault, group)

            def is_back():
                return with_faults.last(group)["pid"] not in (0, old) and with_faults.is_whole()

            back = with_faults.wait(fault, is_back)
            times = sorted(line["time"] for line in with_faults.steps.values())
            gaps = [after - before for before, after in zip(times, times[1:]) if after > at]
            print(f"| {second} | {fault} | {group} | {max(gaps):.1f} | {back:.1f} |", flush=True)
            number += 1
        time.sleep(max(0.0, begun + args.seconds - time.time()))
        done, possible = ([now - then for now, then in zip(run.counts(), was)] for run, was in zip((with_faults, without), first))
    finally:
        with_faults.end()
        without.end()
    counted = [line for step, line in with_faults.steps.items() if step > first[0][0]]
    alone = sum(line["participants"] < GROUPS for line in counted)
    starts = sum(len({line["pid"] for line in lines}) for lines in with_faults.lines) - GROUPS
    differ = sum(len(set(weights.values())) > 1 for weights in with_faults.weights.values())
    print(
        f"\n{args.seconds} s, seed {args.seed}, {number} faults: {done[0]} steps, of which {alone} by one group alone, and "
        f"{done[1]} samples; {possible[0]} steps and {possible[1]} samples without a fault at the same time.\n"
        f"Goodput {done[1] / possible[1]:.4f} by samples, {done[0] / possible[0]:.4f} by steps.\n\n"
        f"- trainers that were started again: {starts}; steps done again from a checkpoint: {with_faults.done_again}\n"
        f"- steps that a group discarded: {with_faults.discarded} with faults, {without.discarded} without; "
        f"steps after which the weights of the groups differ: {differ}\n"
        f"- a step without faults: {args.seconds / possible[0]:.3f} s, of which {args.pause * MICRO_BATCHES:.2f} are the wait\n"
        f"- timeouts of {args.timeout} s (Manager, ProcessGroupGloo, join), {args.heartbeat_timeout} s (heartbeats); "
        f"load {load[0]:.1f} before and {os.getloadavg()[0]:.1f} after\n"
        f"- {versions}, Python {sys.version.split()[0]}, {os.cpu_count()} cores"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--seed", type=int, default=22, help="of the groups that are hit, and of a schedule that is drawn")
    parser.add_argument("--schedule", help="a file with a table of seconds and faults")
    parser.add_argument("--timeout", type=float, default=3.0)
    parser.add_argument("--heartbeat-timeout", type=float, default=3.0)
    parser.add_argument("--pause", type=float, default=0.15, help="seconds of waiting in each loss")
    parser.add_argument("--out", required=True, help="a new folder for logs")
    parser.add_argument("--role", choices=["driver", "supervisor", "trainer"], default="driver", help=argparse.SUPPRESS)
    parser.add_argument("--group", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    {"driver": measure, "supervisor": supervise, "trainer": train}[args.role](args)


if __name__ == "__main__":
    main()
