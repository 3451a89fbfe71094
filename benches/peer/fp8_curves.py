#!/usr/bin/env python3
"""Loss curves of a Llama of 280 million parameters in FP8: megaburn's recipes next to its bf16, and torchao's tensorwise
scaling next to PyTorch's bf16, all from the same weights on the same batches.

    pip install torch torchao transformers xxhash
    cargo build --release --bins --features cuda
    fp8_curves.py --data text.txt --out runs/fp8 [--megaburn target/release/megaburn] [--programs bf16,tensorwise] [--layout dp2] [--save]

The programs are megaburn's recipes, `torch` (bf16) and `torchao`, which use one GPU; megaburn uses those of --layout (tp1 or
dpN). Recipes that GPUs emulate multiply in tf32. Each writes OUT/PROGRAM.jsonl; the report is of all that are there, so that programs can run in several calls. All keep parameters and activations in bf16, and update f32 masters
whose rounding the model holds. Embedding and output projection are not quantised.

Writes OUT/fp8_curves.md, with --save also a section on top of benches/results/fp8_curves.md."""

import argparse, datetime, json, math, pathlib, subprocess, sys
import torch, torch.nn.functional as F, transformers
from curves_report import facts, table
from sample_order import Samples

MODEL = dict(vocab_size=260, hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=16,
             num_key_value_heads=8, max_position_embeddings=1024, rms_norm_eps=1e-5, tie_word_embeddings=True)
SEQ_LEN, VALIDATION, BATCH = 1024, 0.05, 8
LR, MIN_LR, WARMUP, BETAS, EPS, WEIGHT_DECAY, CLIP = 3e-4, 3e-5, 100, (0.9, 0.95), 1e-8, 0.1, 1.0
# Recipes whose products are emulated.
EMULATED = ("mxfp8", "nvfp4")
# Steps whose mean loss is compared.
LAST = 100


def rate(step, steps):
    if step < WARMUP:
        return LR * step / WARMUP
    return MIN_LR + (LR - MIN_LR) * 0.5 * (math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)) + 1)


def pytorch(folder, fp8, samples, args):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").cuda().train()
    params = list(model.parameters())
    masters = [p.detach().clone() for p in params]  # before the rounding
    model.to(torch.bfloat16)
    if fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("tensorwise"), module_filter_fn=lambda _, name: name != "lm_head")
        params = list(model.parameters())
    for layer in model.model.layers:
        layer.compile()
    groups = [dict(params=[m for m in masters if (m.dim() > 1) == decays], weight_decay=WEIGHT_DECAY * decays) for decays in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
    for step in range(args.steps):
        ids = torch.tensor([samples[n] for n in range(step * BATCH, (step + 1) * BATCH)], device="cuda")
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for p, m in zip(params, masters):
            m.grad, p.grad = p.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(masters, CLIP).item()
        yield dict(step=step + 1, loss=loss.item(), grad_norm=norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(step + 1, args.steps)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)


def megaburn(folder, recipe, samples, args):
    run = args.out / f"run-{recipe}"
    ranks = int(args.layout[2:])
    settings = {
        "run.dir": run, "run.seed": args.seed, "run.device": "cuda", "data.seq_len": SEQ_LEN, "data.validation_fraction": VALIDATION,
        "train.dtype": "bf16", "train.tf32": str(recipe in EMULATED).lower(), "precision.recipe": recipe, "train.global_batch": BATCH, "train.micro_batch": BATCH // ranks,
        "train.eval_interval": 0, "train.checkpoint_interval": 0, "train.log_interval": 500, "optimizer.lr": LR,
        "optimizer.min_lr": MIN_LR, "optimizer.warmup_steps": WARMUP, "optimizer.beta1": BETAS[0], "optimizer.beta2": BETAS[1],
        "optimizer.eps": EPS, "optimizer.weight_decay": WEIGHT_DECAY, "optimizer.clip_grad": CLIP, "generate.tokens": 0,
    }
    command = [args.megaburn, "launch", "--nproc", ranks, "--"] if ranks > 1 else []
    command += [args.megaburn, "train", "--init", folder, "--data", args.data, "--layout", args.layout, "--steps", args.steps, "--fresh"]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with open(args.out / f"{recipe}.log", "w") as log:
        subprocess.run([str(word) for word in command], check=True, stdout=log, stderr=subprocess.STDOUT)
    newest = max((run / "checkpoints").glob("step-*"))
    found = json.loads((newest / "manifest.json").read_text())["trainer"]["num_train_samples"]
    if found != samples.num:
        sys.exit(f"the run has {found} samples, not {samples.num}: the batches are not the same")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def report(curves, facts):
    """The mean loss of the last steps, and of those before some others, next to bf16's of the same program."""
    def mean(curve, end):
        return sum(line["loss"] for line in curve[end - LAST : end]) / LAST

    steps = min(map(len, curves.values()))
    ends = [steps * part // 4 for part in (1, 2, 3, 4)]
    base = {who: "torch" if who.startswith("torch") else "bf16" for who in curves}
    rows = []
    for who, curve in curves.items():
        losses = [f"{mean(curve, end):.4f}" for end in ends]
        own = curves.get(base[who])
        apart = f"{mean(curve, steps) / mean(own, steps) - 1:+.2%}" if own and who != base[who] else ""
        rows.append(["megaburn " + who if base[who] == "bf16" else who, f"{curve[0]['loss']:.4f}", *losses, apart])
    head = ["program", "first step", *(f"{LAST} steps to {end}" for end in ends), "last, from its bf16"]
    lines = "\n".join(f"- {key}: {value}" for key, value in facts.items())
    return f"{lines}\n\n{table('mean loss', head, rows)}"


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", type=pathlib.Path, required=True)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--megaburn", default="target/release/megaburn")
    ap.add_argument("--programs", default="bf16,tensorwise,delayed,torch,torchao")
    ap.add_argument("--steps", type=int, default=2000)
    ap.add_argument("--seed", type=int, default=1234, help="of weights and batches")
    ap.add_argument("--layout", default="tp1", choices=["tp1", "dp2", "dp4", "dp8"], help="of megaburn")
    ap.add_argument("--save", action="store_true")
    args = ap.parse_args()
    args.device = "cuda"
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = args.out / "model"
    if not folder.exists():
        torch.manual_seed(args.seed)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL)).save_pretrained(folder)
    samples = Samples(args.data, SEQ_LEN, args.seed, VALIDATION)
    for program in filter(None, args.programs.split(",")):
        if program.startswith("torch"):
            curve = list(pytorch(folder, program == "torchao", samples, args))
            torch.cuda.empty_cache()
        else:
            curve = megaburn(folder, program, samples, args)
        (args.out / f"{program}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in curve))
        print(f"{program}: loss {curve[-1]['loss']:.4f}", file=sys.stderr, flush=True)
    found = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(args.out.glob("*.jsonl"))}
    command = f"benches/peer/fp8_curves.py --data {args.data.name} --steps {args.steps} --seed {args.seed} --layout {args.layout}"
    text = f"## fp8_curves, {datetime.date.today().isoformat()}\n\n{report(found, facts(args, command))}"
    print(text)
    (args.out / "fp8_curves.md").write_text(text)
    if args.save:
        path = pathlib.Path(__file__).resolve().parent.parent / "results" / "fp8_curves.md"
        known = path.read_text()
        begin = known.index("\n## ") + 1 if "\n## " in known else len(known)
        path.write_text(known[:begin] + f"{text}\n" + known[begin:])


if __name__ == "__main__":
    main()
