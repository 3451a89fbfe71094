#!/usr/bin/env python3
"""Loss curves of a small Llama in f32, bf16 and f16: megaburn's next to PyTorch's, from the same weights on the same batches.

    pip install torch transformers xxhash
    cargo build --release --bins
    curves.py --data tinyshakespeare.txt --out runs/curves [--megaburn target/release/megaburn] [--device cuda] [--save]
    curves.py .. --seed 2    # other weights and batches

In the bundle of `.ci/bundle` it is `python3 benches/peer/curves.py --megaburn bin/megaburn ..`. On a CPU that others use,
OMP_NUM_THREADS=1: PyTorch's threads wait for each other otherwise, ten times as long.

Draws a LlamaForCausalLM, which `megaburn train --init` starts from; PyTorch reads the batches that the run reads
(`sample_order.py`). Both keep parameters and activations in the type, sum gradients of micro-batches in f32, and update f32
masters whose rounding the model holds, as Megatron-LM does. That is not autocast: its parameters and what is between
matrices stay f32, which would be compared with less rounding than there is here.

Writes OUT/{megaburn,pytorch,sdpa}-TYPE.jsonl, OUT/curves.md and OUT/curves.svg, with --save also a section on
top of benches/results/curves.md, and benches/results/archive/DATE-curves.svg.
`sdpa` is PyTorch again, with its fused attention in the place of the eager one: how far apart two right answers are."""

import argparse, datetime, json, math, pathlib, subprocess, sys
import torch, torch.nn.functional as F, transformers
from curves_report import facts, report
from sample_order import Samples

DTYPES = dict(f32=torch.float32, bf16=torch.bfloat16, f16=torch.float16)
MODEL = dict(vocab_size=260, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=True)
SEQ_LEN, VALIDATION, BATCH, MICRO_BATCH = 128, 0.05, 8, 4
LR, MIN_LR, WARMUP, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, 1e-4, 20, (0.9, 0.95), 1e-8, 0.1, 1.0
# The scale grows within the run: Megatron's window is 1000 steps.
WINDOW, HYSTERESIS = 50, 2


class LossScaler:
    """Megatron-LM's `DynamicGradScaler`."""

    def __init__(self, initial):
        self.scale, self.clean, self.tolerated = initial, 0, HYSTERESIS

    def update(self, overflowed):
        if overflowed:
            self.clean = 0
            self.tolerated -= 1
            if self.tolerated <= 0:
                self.scale = max(self.scale * 0.5, 1.0)
            return
        self.clean += 1
        if self.clean == WINDOW:
            self.clean, self.tolerated = 0, HYSTERESIS
            self.scale *= 2.0


def rate(trained, steps):
    """The value for the update after which this number of samples were trained on."""
    warmup, decay = WARMUP * BATCH, steps * BATCH
    if trained < warmup:
        return LR * trained / warmup
    return MIN_LR + (LR - MIN_LR) * 0.5 * (math.cos(math.pi * (trained - warmup) / (decay - warmup)) + 1)


def pytorch(folder, name, attention, samples, args):
    """Yields a step at a time what `metrics.jsonl` has."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32, attn_implementation=attention).to(args.device).train()
    params = list(model.parameters())
    masters = [p.detach().clone().requires_grad_() for p in params]  # before the rounding
    model.to(DTYPES[name])
    groups = [dict(params=[m for m in masters if (m.dim() > 1) == decays], weight_decay=WEIGHT_DECAY * decays) for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    scaler = LossScaler(args.initial_loss_scale) if name == "f16" else None
    tokens, trained = BATCH * SEQ_LEN, 0
    for step in range(args.steps):
        lr = rate(trained + BATCH, args.steps)
        # A sum over tokens, which f16 cannot hold the gradients of, is divided before and not behind backward there.
        factor = scaler.scale / tokens if scaler else 1.0
        total = 0.0
        for m in masters:
            m.grad = torch.zeros_like(m)
        for first in range(step * BATCH, (step + 1) * BATCH, MICRO_BATCH):
            ids = torch.tensor([samples[n] for n in range(first, first + MICRO_BATCH)], device=args.device)
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            (loss * factor).backward()
            total += loss.item()
            for p, m in zip(params, masters):
                m.grad += p.grad.float()
                p.grad = None
        for m in masters:
            m.grad /= factor * tokens
        norm = torch.nn.utils.clip_grad_norm_(masters, CLIP).item()
        finite = math.isfinite(norm) and math.isfinite(total)
        yield dict(step=step + 1, loss=total / tokens, grad_norm=norm if finite else None, lr=lr,
                   loss_scale=scaler and scaler.scale, skipped=not finite)
        if finite:
            trained += BATCH
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            with torch.no_grad():
                for p, m in zip(params, masters):
                    p.copy_(m)
        elif scaler is None:
            sys.exit(f"step {step + 1} of PyTorch in {name} is not finite")
        if scaler:
            scaler.update(not finite)


def megaburn(folder, name, samples, args):
    run = args.out / name
    settings = {
        "run.dir": run, "run.seed": args.seed, "run.device": args.device, "data.seq_len": SEQ_LEN,
        "data.validation_fraction": VALIDATION, "train.dtype": name, "train.global_batch": BATCH,
        "train.micro_batch": MICRO_BATCH, "train.eval_interval": 0, "train.checkpoint_interval": 0,
        "train.log_interval": 50, "optimizer.lr": LR, "optimizer.min_lr": MIN_LR, "optimizer.warmup_steps": WARMUP,
        "optimizer.beta1": BETAS[0], "optimizer.beta2": BETAS[1], "optimizer.eps": EPS,
        "optimizer.weight_decay": WEIGHT_DECAY, "optimizer.clip_grad": CLIP,
        "optimizer.initial_loss_scale": args.initial_loss_scale, "optimizer.loss_scale_window": WINDOW,
        "optimizer.hysteresis": HYSTERESIS, "generate.tokens": 0,
    }
    command = [args.megaburn, "train", "--init", folder, "--data", args.data, "--layout", args.layout, "--steps", args.steps, "--fresh"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    with open(args.out / f"{name}.log", "w") as log:
        subprocess.run([str(word) for word in command], check=True, stdout=log, stderr=subprocess.STDOUT)
    newest = max((run / "checkpoints").glob("step-*"))
    found = json.loads((newest / "manifest.json").read_text())["trainer"]["num_train_samples"]
    if found != samples.num:
        sys.exit(f"the run has {found} samples, not {samples.num}: the batches are not the same")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def check(curves, steps):
    """In f32 the first steps are the same, or something else is being compared than is said."""
    ours, theirs = curves["megaburn", "f32"], curves["pytorch", "f32"]
    if [len(curve) for curve in curves.values()] != [steps] * len(curves):
        sys.exit("a curve has other steps")
    for a, b in zip(ours[:WARMUP], theirs):
        if abs(a["loss"] - b["loss"]) > 1e-3 or abs(a["lr"] - b["lr"]) > 1e-9:
            sys.exit(f"other weights, batches or rates: {a} {b}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", type=pathlib.Path, required=True)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--megaburn", default="target/release/megaburn")
    ap.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    ap.add_argument("--layout", default="tp1")
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--initial-loss-scale", type=float, default=2.0**16, help="of f16")
    ap.add_argument("--seed", type=int, default=1234, help="of weights and batches")
    ap.add_argument("--save", action="store_true")
    args = ap.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = args.out / "model"
    torch.manual_seed(args.seed)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL)).save_pretrained(folder)
    samples = Samples(args.data, SEQ_LEN, args.seed, VALIDATION)
    curves = {}
    for name in DTYPES:
        curves["megaburn", name] = megaburn(folder, name, samples, args)
        curves["pytorch", name] = list(pytorch(folder, name, "eager", samples, args))
        curves["sdpa", name] = list(pytorch(folder, name, "sdpa", samples, args))
        print(f"{name}: done", file=sys.stderr, flush=True)
    for (who, name), curve in curves.items():
        (args.out / f"{who}-{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in curve))
    check(curves, args.steps)
    command = f"benches/peer/curves.py --data {args.data.name} --steps {args.steps} --layout {args.layout} --device {args.device} --initial-loss-scale {args.initial_loss_scale:g} --seed {args.seed}"
    text, svg = report(curves, facts(args, command), datetime.date.today().isoformat())
    print(text)
    (args.out / "curves.md").write_text(text)
    (args.out / "curves.svg").write_text(svg)
    if args.save:
        results = pathlib.Path(__file__).resolve().parent.parent / "results"
        (results / "archive" / f"{datetime.date.today().isoformat()}-curves.svg").write_text(svg)
        known = (results / "curves.md").read_text()
        begin = known.index("\n## ") + 1
        (results / "curves.md").write_text(known[:begin] + f"#{text}\n" + known[begin:])


if __name__ == "__main__":
    main()
