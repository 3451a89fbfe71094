"""The tables and the picture of `curves.py`, and the facts of a run."""

import math, pathlib, platform, subprocess
import torch, transformers

DTYPES = ("f32", "bf16", "f16")
ABOUT = """Loss of a byte-level Llama (0.8 million parameters, vocabulary 260) over {steps} steps of 1024 tokens, with warm-up, cosine decay, weight decay and clipping: megaburn next to Transformers' LlamaForCausalLM, from the same weights, on the same batches, two micro-batches a step. Both keep parameters and activations in the type, sum gradients in f32 and update f32 masters whose rounding the model holds (no autocast). megaburn's GEMMs write the gradients of matrices in f32; PyTorch's gradients have the type until they are added. The f16 loss is scaled by Megatron-LM's dynamic rule, which the PyTorch script implements, from 2^{scale:g} on and twice as much after 50 steps.

A difference is the difference between two losses of the same step, before its update, in nats per token. Training magnifies rounding, so compare each difference with that between two correct runs: PyTorch with fused attention (sdpa) and PyTorch with eager attention."""


def facts(args, command):
    """The machine, the commit and the versions of a run."""
    def output(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True, cwd=here).stdout.strip()
        except OSError:
            return ""

    here = pathlib.Path(__file__).resolve().parent
    bundled = here.parent.parent / "COMMIT"
    commit = bundled.read_text() if bundled.is_file() else output("git", "rev-parse", "HEAD")
    dirty = not bundled.is_file() and output("git", "status", "--porcelain", "--untracked-files=no")
    cpu = [line for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"{cpu[0].split(': ')[1]}, {len(cpu)} cores"
    return {
        "machine": f"{machine}, {platform.system()}; ours under {args.layout}",
        "load": "nothing here is a time",
        "commit": commit[:12] + (" with changes" if dirty else ""),
        "command": f"`{command}`",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }


def difference(a, b):
    """Largest and mean distance, and the mean of what a is above b."""
    signed = [x["loss"] - y["loss"] for x, y in zip(a, b)]
    distance = [abs(d) for d in signed]
    return max(distance), sum(distance) / len(distance), sum(signed) / len(signed)


def table(title, head, rows):
    rows = [head] + rows
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) + " |" for row in rows]
    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([f"### {title}", "", lines[0], rule, *lines[1:]]) + "\n"


def tables(curves):
    def row(name, *pairs):
        numbers = [difference(curves[a], curves[b]) for a, b in pairs]
        return [name] + [f"{n:+.1e}" if i == 2 else f"{n:.1e}" for three in numbers for i, n in enumerate(three)]

    yield table(
        "of the same type: megaburn from PyTorch, and PyTorch from itself (sdpa from eager)",
        ["type", "largest", "mean", "mean above", "PyTorch: largest", "mean", "mean above"],
        [row(d, (("megaburn", d), ("pytorch", d)), (("sdpa", d), ("pytorch", d))) for d in DTYPES],
    )
    yield table(
        "what the type moves: from f32 of the same program",
        ["type", "megaburn: largest", "mean", "mean above", "PyTorch: largest", "mean", "mean above"],
        [row(d, (("megaburn", d), ("megaburn", "f32")), (("pytorch", d), ("pytorch", "f32"))) for d in DTYPES[1:]],
    )

    def end(who, d):
        last = curves[who, d][-20:]
        return f"{sum(line['loss'] for line in last) / len(last):.4f}"

    def skipped(who):
        steps = [line["step"] for line in curves[who, "f16"] if line.get("skipped")]
        return ", ".join(map(str, steps)) or "none"

    yield table(
        "mean loss of the last 20 steps",
        ["type", "megaburn", "PyTorch", "PyTorch, sdpa"],
        [[d] + [end(who, d) for who in ("megaburn", "pytorch", "sdpa")] for d in DTYPES],
    )
    scale = f"{curves['megaburn', 'f16'][-1]['loss_scale']:.0f}, PyTorch's {curves['pytorch', 'f16'][-1]['loss_scale']:.0f}"
    yield f"Steps that f16 skipped: megaburn {skipped('megaburn')}; PyTorch {skipped('pytorch')}; sdpa {skipped('sdpa')}. Loss scale at the end: megaburn's {scale}.\n"


def picture(curves):
    """The curves above; below, on a scale of powers of ten, how far megaburn is from PyTorch."""
    width, left, tops, height = 960, 60, (40, 330), 240
    steps = len(curves["megaburn", "f32"])
    colours = dict(f32="#3c4048", bf16="#2563af", f16="#d65d0e")
    losses = [line["loss"] for curve in curves.values() for line in curve]
    low, high = math.floor(min(losses)), math.ceil(max(losses))
    powers = (-8, 0)
    parts = []

    def place(panel, step, part):
        x = left + (width - left - 20) * (step - 1) / (steps - 1)
        return f"{x:.1f},{tops[panel] + height * (1 - part):.1f}"

    def line(panel, values, colour, dashes=""):
        points = " ".join(place(panel, i + 1, min(max(v, 0), 1)) for i, v in enumerate(values))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dashes}" points="{points}"/>')

    def text(x, y, words, colour="#3c4048"):
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{words}</text>')

    text(left, 24, "loss: megaburn drawn through, PyTorch dashed")
    text(left, 314, "distance of the two, by step")
    for panel, (bottom, top) in enumerate([(low, high), powers]):
        for mark in range(bottom, top + 1):
            part = (mark - bottom) / (top - bottom)
            y = tops[panel] + height * (1 - part)
            parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            text(10, y + 4, f"1e{mark}" if panel else mark)
    for i, (d, colour) in enumerate(colours.items()):
        ours, theirs = ([entry["loss"] for entry in curves[who, d]] for who in ("megaburn", "pytorch"))
        line(0, [(v - low) / (high - low) for v in ours], colour)
        line(0, [(v - low) / (high - low) for v in theirs], colour, "3 6")
        distances = [max(abs(a - b), 1e-8) for a, b in zip(ours, theirs)]
        line(1, [(math.log10(v) - powers[0]) / (powers[1] - powers[0]) for v in distances], colour)
        text(width - 160 + 50 * i, 24, d, colour)
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 600" font-family="sans-serif" font-size="13">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'


def report(curves, facts, date):
    scale = math.log2(curves["megaburn", "f16"][0]["loss_scale"])
    about = ABOUT.format(steps=len(curves["megaburn", "f32"]), scale=scale)
    lines = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    return f"# curves, {date}\n\n{about}\n\n{lines}\n\n" + "\n".join(tables(curves)), picture(curves)
