"""What scripts of this folder have in common that write a section of a result file."""

import datetime, pathlib, shlex, subprocess, sys

HERE = pathlib.Path(__file__).resolve().parent


def output(command):
    """The standard output of a command."""
    return subprocess.run([str(word) for word in command], capture_output=True, text=True).stdout


def facts(num_ranks, device):
    """The machine, the commit and the command, as list items."""
    bundled = HERE.parent / "COMMIT"
    commit = bundled.read_text() if bundled.is_file() else output(["git", "-C", HERE, "rev-parse", "HEAD"])
    machine = f"CPU, {num_ranks} ranks: a trial of this script, not a measurement"
    if device != "cpu":
        gpus = output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).splitlines()
        machine = f"{len(gpus)} GPUs, {gpus[0]}"
    return f"- machine: {machine}\n- commit: {commit[:12]}\n- command: `{shlex.join(sys.argv)}`"


def write(args, name, file, title, text):
    """Prints a section and writes it as OUT/NAME.md, with --save also on top of results/FILE.md."""
    section = f"## {title}, {datetime.date.today()}\n\n{text}\n"
    (args.out / f"{name}.md").write_text(section)
    print("\n" + section)
    if args.save:
        results = HERE / "results" / f"{file}.md"
        head, mark, rest = results.read_text().partition("\n## ")
        results.write_text(head + "\n" + section + mark + rest)
