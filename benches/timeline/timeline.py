"""When the kernels of a CUDA program ran, and how much of its communication nothing hides; of any program, ours or a
peer's, so that both are measured alike.

    python3 timeline.py record OUT COMMAND ..     # into OUT.PID, one file a process that used a GPU
    python3 timeline.py report OUT.PID .. [--svg FILE] [--names N]

A step is what lies between the ends of two updates (kernels with `adam` in their name). Of each it prints how long the
GPU computed, how long NCCL's kernels ran, how long these ran alone (exposed), and how long nothing ran (idle); then
the medians, and with --names where the computing went. --svg draws the step of the first file whose length is the median,
and what the other files' processes did meanwhile: the stages of a pipeline, say.

With TIMELINE_CALLS=CALLS in its environment, record also writes the driver's calls into CALLS.PID, a line each: start, end
(both ns, by the kernels' clock), thread, name.

An update whose kernels lie 5 ms or more apart (optimizer state that comes from host memory) is taken for several. Records
that CUPTI drops are not counted: a long idle time may be one."""

import argparse, os, re, shutil, statistics, subprocess, sys, tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
COLORS = {"nccl": "#d1495b", "gemm": "#30638e", "attention": "#edae49", "copy": "#8d6a9f", "update": "#3b8f6a", "other": "#9aa5b1"}


def build(folder):
    """The library that the driver loads, made of the CUPTI that is there: its newest records have the most fields."""
    roots = ["/usr/local/cuda/extras/CUPTI", "/usr/local/cuda"]
    try:
        import site
        roots += [os.path.join(s, "nvidia", p) for s in site.getsitepackages() for p in ("cu13", "cuda_cupti", "cuda_runtime")]
    except ImportError:
        pass
    includes = [os.path.join(r, "include") for r in roots if os.path.isdir(os.path.join(r, "include"))]
    libs = [os.path.join(r, d) for r in roots for d in ("lib64", "lib") if os.path.isdir(os.path.join(r, d))]
    header = next(p for p in (os.path.join(i, "cupti_activity.h") for i in includes) if os.path.exists(p))
    text = open(header).read()
    newest = lambda name: name + max(re.findall(rf"\}} {name}(\d+);", text), key=int)
    found = [os.path.join(l, f) for l in libs for f in sorted(os.listdir(l)) if re.match(r"libcupti\.so", f)]
    library = os.path.join(folder, "libtimeline.so")
    command = [shutil.which("gcc") or "cc", "-O1", "-shared", "-fPIC", "-w", os.path.join(HERE, "inject.c"), "-o", library]
    command += [f"-DKERNEL_RECORD={newest('CUpti_ActivityKernel')}", f"-DMEMCPY_RECORD={newest('CUpti_ActivityMemcpy')}"]
    command += [f"-I{i}" for i in includes] + [found[0], f"-Wl,-rpath,{os.path.dirname(found[0])}"]
    subprocess.run(command, check=True)
    return library


def record(out, command):
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, CUDA_INJECTION64_PATH=build(folder), TIMELINE_OUT=out)
        return subprocess.run(command, env=env).returncode


def kind(name):
    low = name.lower()
    if "nccl" in low:
        return "nccl"
    if low.startswith("memcpy"):
        return "copy"
    if "adam" in low:
        return "update"
    if "nvjet" in low or "gemm" in low or "cutlass" in low:
        return "gemm"
    if any(word in low for word in ("sdpa", "attention", "flash", "fmha")):
        return "attention"
    return "other"


def union(spans):
    out = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out


def length(spans):
    return sum(end - start for start, end in spans)


def without(spans, others):
    """What of one union is not in another."""
    return length(union(spans + others)) - length(others)


def load(path):
    rows = []
    for line in open(path, errors="replace"):
        parts = line.rstrip("\n").split("\t", 3)
        if len(parts) == 4:
            rows.append((int(parts[0]), int(parts[1]), int(parts[2]), parts[3]))
    return sorted(rows)


def steps(rows):
    """From the end of an update to the end of the next; an update's kernels lie less than 5 ms apart."""
    ends = []
    for start, end, _, name in rows:
        if kind(name) == "update":
            if ends and start - ends[-1] < 5e6:
                ends[-1] = max(end, ends[-1])
            else:
                ends.append(end)
    return list(zip(ends, ends[1:]))


def look(rows, begin, end):
    inside = [(max(s, begin), min(e, end), st, n) for s, e, st, n in rows if e > begin and s < end]
    spans = lambda want: union([[s, e] for s, e, _, n in inside if want(kind(n))])
    busy, talk = spans(lambda k: k not in ("nccl", "copy")), spans(lambda k: k == "nccl")
    every = union(busy + talk + spans(lambda k: k == "copy"))
    ms = lambda x: x / 1e6
    return {"step": ms(end - begin), "computing": ms(length(busy)), "nccl": ms(length(talk)),
            "exposed": ms(without(talk, busy)), "idle": ms(end - begin - length(every))}, inside


def draw(processes, begin, end, path):
    """What each process had inside the step: a row for each of its streams, the busiest first."""
    inside = [(s, e, (process, st), n) for process, rows in enumerate(processes) for s, e, st, n in rows]
    taken = {}
    for s, e, place, _ in inside:
        taken[place] = taken.get(place, 0) + e - s
    streams = sorted(taken, key=lambda place: (place[0], -taken[place]))
    width, row = 1800, 26
    x = lambda t: 10 + (t - begin) / (end - begin) * (width - 20)
    height = 60 + row * len(streams)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
           f'<rect width="{width}" height="{height}" fill="white"/>']
    for i, (what, color) in enumerate(COLORS.items()):
        out.append(f'<rect x="{10 + 110 * i}" y="8" width="14" height="12" fill="{color}"/><text x="{28 + 110 * i}" y="19">{what}</text>')
    out.append(f'<text x="{10 + 110 * len(COLORS)}" y="19">one step, {(end - begin) / 1e6:.1f} ms; a row is a stream{" of a process" if len(processes) > 1 else ""}</text>')
    for index, stream in enumerate(streams):
        if index and stream[0] != streams[index - 1][0]:
            y = 40 + row * index - 3
            out.append(f'<line x1="10" x2="{width - 10}" y1="{y}" y2="{y}" stroke="#3c4048"/>')
        last = None
        for s, e, _, n in sorted(r for r in inside if r[2] == stream):
            what = kind(n)
            # Neighbours of one colour that the eye cannot tell apart are one rectangle.
            if last and last[2] == what and x(s) - x(last[1]) < 0.3:
                last[1] = e
                continue
            if last:
                out.append(box(last, index, x, row))
            last = [s, e, what]
        if last:
            out.append(box(last, index, x, row))
    open(path, "w").write("\n".join(out + ["</svg>", ""]))


def box(span, index, x, row):
    s, e, what = span
    return f'<rect x="{x(s):.1f}" y="{40 + row * index}" width="{max(x(e) - x(s), 0.3):.1f}" height="{row - 6}" fill="{COLORS[what]}"/>'


def medians(rows, path, names):
    """Prints them, and gives begin and end of the step that has the median's length."""
    found = [(look(rows, b, e), b, e) for b, e in steps(rows)][2:]
    if not found:
        sys.exit(f"{path}: fewer than four updates")
    keys = ["step", "computing", "nccl", "exposed", "idle"]
    median = {k: statistics.median(f[0][0][k] for f in found) for k in keys}
    print("\t".join(f"{k} {median[k]:.2f} ms" for k in keys), f"({len(found)} steps)", sep="\t")
    (_, inside), begin, end = min(found, key=lambda f: abs(f[0][0]["step"] - median["step"]))
    if names:
        total = {}
        for s, e, _, n in inside:
            n = re.sub(r"\d{4,}", "#", n)[:100]
            total[n] = (total.get(n, (0, 0))[0] + e - s, total.get(n, (0, 0))[1] + 1)
        for n, (t, c) in sorted(total.items(), key=lambda x: -x[1][0])[:names]:
            print(f"{t / 1e6:9.3f} ms {c:5d} x {n}")
    return begin, end


def report(paths, svg, names):
    processes = [load(path) for path in paths]
    found = [medians(rows, path, names) for rows, path in zip(processes, paths)]
    if svg:
        draw([look(rows, *found[0])[1] for rows in processes], *found[0], svg)


def main():
    if len(sys.argv) > 3 and sys.argv[1] == "record":
        sys.exit(record(sys.argv[2], sys.argv[3:]))
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["report"])
    parser.add_argument("path", nargs="+")
    parser.add_argument("--svg")
    parser.add_argument("--names", type=int, default=0)
    args = parser.parse_args()
    report(args.path, args.svg, args.names)


main()
