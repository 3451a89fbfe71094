#!/usr/bin/env python3
"""How far the first choice of `megaburn search` is from the fastest of all layouts of this machine's GPUs.

    search_sweep.py CONFIG --gpus 2 --gpu h200 [--set KEY=VALUE].. [--megaburn ./run megaburn] [--save]
    search_sweep.py configs/llama-tiny.toml --gpus 2 --device cpu --set data.path=text.txt    # a trial without GPUs

The sweep has every layout of tp, cp, pp and dp with the schedules of a pipeline, ZeRO 1 to 3, micro-batches of 1, 2 and 4, and
nothing or norms and activations recomputed. `megaburn plan` predicts each; those that fit are trained, the fastest by prediction
first, as `megaburn search --measure` does: the median of five steps after four others. A run that fails is listed with its last
line. Each row is printed when it is there, and OUT/sweep.jsonl has what was measured: a sweep that was stopped continues from it.

Writes OUT/search_sweep.md, with --save also a section on top of benches/results/search.md."""

import argparse, json, pathlib, shlex, statistics, subprocess, sys, tempfile, time

from section import facts, write

WARM_UP, STEPS = 4, 5
SCHEDULES = [("1f1b", None), ("interleaved", 2), ("interleaved", 4), ("zb-h1", None), ("zb-v", None)]


def divisors(number):
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def layouts(gpus):
    """Every layout as `--layout` takes it, with pp and the number of ranks that hold copies of a parameter."""
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            for cp in divisors(gpus // tp // pp):
                dp = gpus // tp // pp // cp
                axes = [f"{name}{degree}" for name, degree in (("tp", tp), ("cp", cp), ("pp", pp), ("dp", dp)) if degree > 1]
                yield "-".join((axes or ["dp1"]) + (["sp"] if tp > 1 else [])), pp, dp * cp


def runs(gpus):
    """Every layout with every setting."""
    for layout, pp, copies in layouts(gpus):
        for kind, chunks in SCHEDULES if pp > 1 else [(None, None)]:
            for zero in (1, 2, 3) if copies > 1 else (0,):
                for micro_batch in (1, 2, 4):
                    for modules in ("[]", '["norm","activation"]'):
                        sets = [f"parallel.zero={zero}", f"train.micro_batch={micro_batch}", f"recompute.modules={modules}"]
                        sets += [f"parallel.schedule={kind}"] if kind else []
                        sets += [f"parallel.chunks={chunks}"] if chunks else []
                        yield layout, sets


def flags(sets):
    return [word for one in sets for word in ("--set", one)]


def words(layout, sets):
    return shlex.join(["--layout", layout] + flags(sets))


def output(command):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return ((errors or lines)[-1] if lines else "no output")[:160]


def planned(args, layout, sets):
    """The predicted milliseconds of a step; a reason if the run does not fit or cannot be run."""
    ended = output([*args.megaburn, "plan", args.config, "--gpu", args.gpu, "--json", "--layout", layout]
                   + flags(args.set + sets))
    if ended.returncode:
        return last_line(ended.stderr)
    plan = json.loads(ended.stdout)
    return plan["time"]["step_ms"] if plan["fits"] else "does not fit"


def steps(metrics):
    """Milliseconds of each step so far. The last line may be half written."""
    found = []
    for line in metrics.read_text().splitlines() if metrics.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            break
        if "eval_loss" not in record and (record.get("tokens_per_second") or 0) > 0:
            found.append(record["tokens"] / record["tokens_per_second"] * 1e3)
    return found


def measured(args, layout, sets):
    """The measured milliseconds of a step, or why the run failed."""
    with tempfile.TemporaryDirectory(prefix="megaburn-sweep-") as folder:
        folder = pathlib.Path(folder)
        own = [f"run.dir={json.dumps(str(folder / 'run'))}", "train.eval_interval=0", "train.checkpoint_interval=0",
               "train.checkpoint_interval_minutes=0", "train.log_interval=1"]
        command = [*args.megaburn, "train", "--config", args.config, "--layout", layout, "--ranks", args.gpus]
        command += ["--device", args.device] if args.device else []
        command += flags(args.set + sets + own)
        with open(folder / "log", "w") as log:
            run = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            start, error = time.monotonic(), None
            try:
                while len(steps(folder / "run" / "metrics.jsonl")) < WARM_UP + STEPS:
                    if run.poll() is not None:
                        error = last_line((folder / "log").read_text())
                        break
                    if time.monotonic() - start > args.timeout:
                        error = f"{WARM_UP + STEPS} steps took more than {args.timeout} s"
                        break
                    time.sleep(0.1)
            finally:
                # The ranks end with the process that started them.
                run.kill()
                run.wait()
        times = steps(folder / "run" / "metrics.jsonl")[WARM_UP:WARM_UP + STEPS]
        # A run may have ended between a look at its steps and one at its process.
        return statistics.median(times) if len(times) == STEPS else error or "no step was measured"


def searched(args):
    """The first choice of the search, and the seconds that it took."""
    start = time.monotonic()
    ended = output([*args.megaburn, "search", args.config, "--gpus", args.gpus, "--gpu", args.gpu, "--json", "--top", 1]
                   + flags(args.set))
    if ended.returncode:
        sys.exit(f"search_sweep.py: the search failed: {last_line(ended.stderr) if ended.stderr else 'nothing fits'}")
    best = json.loads(ended.stdout)["found"]["best"][0]
    return best["layout"], best["settings"], best["step_ms"], time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--gpu", default="h200", help="the GPU that is planned for, as in `megaburn search`")
    parser.add_argument("--device", help="the device to train on, as in `megaburn train`")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--megaburn", type=shlex.split, default=["./run", "megaburn"])
    parser.add_argument("--limit", type=int, help="train only this many of the fastest by prediction")
    parser.add_argument("--shown", type=int, default=10, help="rows of the table: the fastest")
    parser.add_argument("--timeout", type=int, default=600, help="seconds of a run")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/search_sweep"))
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen_layout, chosen_sets, chosen_ms, seconds = searched(args)
    chosen = words(chosen_layout, chosen_sets)
    print(f"search   {chosen}: {chosen_ms:.1f} ms predicted, found in {seconds:.1f} s", flush=True)

    plans = [(layout, sets, planned(args, layout, sets)) for layout, sets in runs(args.gpus)]
    fit = sorted((run for run in plans if not isinstance(run[2], str)), key=lambda run: run[2])
    others = [run for run in plans if isinstance(run[2], str)]
    no_room = sum(reason == "does not fit" for *_, reason in others)
    print(f"plans    {len(plans)}: {len(fit)} fit, {no_room} do not fit, {len(others) - no_room} cannot be run", flush=True)
    for reason in sorted({reason for *_, reason in others} - {"does not fit"}):
        print(f"refused  {reason}")
    journal = args.out / "sweep.jsonl"
    known = {}
    for line in journal.read_text().splitlines() if journal.is_file() else []:
        record = json.loads(line)
        if record["of"] == [args.config, args.set, args.gpus, args.device]:
            known[record["run"]] = record["found"]

    def measure(layout, sets):
        name = words(layout, sets)
        if name not in known:
            known[name] = measured(args, layout, sets)
            record = {"of": [args.config, args.set, args.gpus, args.device], "run": name, "found": known[name]}
            with open(journal, "a") as file:
                file.write(json.dumps(record) + "\n")
        return known[name]

    def show(what, name, found, predicted):
        text = found if isinstance(found, str) else f"{found:.1f} ms, {found / predicted:.2f} times the predicted {predicted:.1f} ms"
        print(f"{what} {name}: {text}", flush=True)

    of_choice = measure(chosen_layout, chosen_sets)
    show("chosen  ", chosen, of_choice, chosen_ms)
    rows = []
    for layout, sets, predicted in fit[:args.limit]:
        found = measure(layout, sets)
        show("measured", words(layout, sets), found, predicted)
        rows.append((layout, sets, predicted, found))
    failed = [row for row in rows if isinstance(row[3], str)]
    rows = sorted((row for row in rows if not isinstance(row[3], str)), key=lambda row: row[3])
    table = ["| layout | settings | predicted ms | measured ms |", "|---|---|---:|---:|"]
    lines = [("**search** " + chosen_layout, chosen_sets, chosen_ms, of_choice)] + rows[:args.shown]
    for layout, sets, predicted, found in lines:
        found = found if isinstance(found, str) else f"{found:.1f}"
        table.append(f"| {layout} | {'`' + ' '.join(sets) + '`' if sets else ''} | {predicted:.1f} | {found} |")
    if isinstance(of_choice, str) or not rows:
        verdict = "The first choice of the search was not measured." if rows else "No run was measured."
    else:
        more = of_choice / rows[0][3] - 1
        verdict = f"The first choice of the search takes {100 * abs(more):.1f}% {'more' if more >= 0 else 'less'} than the fastest of the sweep."
    counted = f"{len(plans)} runs were planned, {len(fit)} fit, {len(rows)} were measured, {len(failed)} failed."
    failures = "".join(f"\n- failed: {layout} `{' '.join(sets)}`: {found}" for layout, sets, _, found in failed)
    text = f"{verdict} {counted} The fastest:\n\n" + "\n".join(table) + f"\n\n{facts(args.gpus, args.device)}{failures}"
    write(args, "search_sweep", "search", f"sweep of {args.gpus} GPUs", text)


if __name__ == "__main__":
    main()
