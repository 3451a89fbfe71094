#!/usr/bin/env python3
"""What bf16 costs Transformers on the fixtures that `megaburn verify` reads: one line of JSON a folder, in verify's metrics.

    pip install torch transformers safetensors
    hf_bf16_error.py [--device cuda] [--attention eager] FIXTURE_DIR ...

Parameters and activations are bf16 (`model.to(bfloat16)`); the reference is the f32 one in reference.safetensors:
    logits_max_abs  largest |logit - reference|             loss_abs  |loss - reference|
    grad_rel_max    largest ||g - g_ref|| / max(||g_ref||, 1e-6 ||all gradients||) over tensors, grad_worst its name
    train_losses_max_abs  over the steps of AdamW on that batch, with f32 masters whose rounding the model holds and gradients
                    widened to f32, as a bf16 run of megaburn does (torch.optim.AdamW on bf16 parameters alone loses updates)
"""
import argparse, json, pathlib, tempfile, torch, transformers
from safetensors.torch import load_file


def gradients_as_saved(model):
    """The gradients under the names and in the layout of model.safetensors, as hf_reference.py writes them."""
    kept = {n: p.data for n, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.grad.clone() if p.grad is not None else torch.zeros_like(p)
    with tempfile.TemporaryDirectory() as d:
        model.save_pretrained(d)
        g = load_file(pathlib.Path(d) / "model.safetensors")
    for n, p in model.named_parameters():
        p.data = kept[n]
    return g


def errors(path, device, attention):
    ref = load_file(path / "reference.safetensors")
    spec = json.loads((path / "reference.json").read_text())["optimizer"]
    cls = getattr(transformers, json.loads((path / "config.json").read_text())["architectures"][0])
    model = cls.from_pretrained(path, dtype=torch.float32, attn_implementation=attention, **({"experts_implementation": "eager"} if cls.__name__.endswith("CausalLM") else {})).to(device).train()
    masters = {n: p.detach().clone() for n, p in model.named_parameters()}  # before the rounding
    model = model.to(torch.bfloat16)
    inputs = {n: ref[n].to(device) for n in ("input_ids", "attention_mask", "token_type_ids", "next_sentence_label") if n in ref}
    inputs["labels"] = ref.get("labels", ref["input_ids"]).to(device)
    out = model(**inputs)
    out.loss.backward()
    found = dict(family=model.config.model_type, fixture=path.name, torch=torch.__version__, device=device)
    logits = out.prediction_logits if "prediction_logits" in out else out.logits
    found["logits_max_abs"] = (logits.detach().float().cpu() - ref["logits"]).abs().max().item()
    found["loss_abs"] = abs(out.loss.item() - ref["loss"].item())
    scale = json.load(open(path / "reference.json")).get("gradient_scale", 1.0)
    want = {n.removeprefix("grad."): g.float() / scale for n, g in ref.items() if n.startswith("grad.")}
    floor = 1e-6 * sum(g.double().square().sum() for g in want.values()).sqrt()
    got = gradients_as_saved(model)
    rel = {n: ((got[n].double().cpu() - g.double()).norm() / max(g.double().norm(), floor)).item() for n, g in want.items()}
    found["grad_worst"] = max(rel, key=rel.get)
    found["grad_rel_max"] = rel[found["grad_worst"]]
    decay = [m for m in masters.values() if m.dim() >= 2]
    rest = [m for m in masters.values() if m.dim() < 2]
    opt = torch.optim.AdamW([dict(params=decay, weight_decay=spec["weight_decay"]), dict(params=rest, weight_decay=0.0)],
                            lr=spec["lr"], betas=tuple(spec["betas"]), eps=spec["eps"])
    worst = 0.0
    for want_loss in ref.get("train_losses", torch.tensor([])).tolist():
        model.zero_grad()
        loss = model(**inputs).loss
        worst = max(worst, abs(loss.item() - want_loss))
        loss.backward()
        for n, p in model.named_parameters():
            masters[n].grad = p.grad.float()
        opt.step()
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(masters[n])
    found["train_losses_max_abs"] = worst if "train_losses" in ref else None
    return found


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("dirs", nargs="+", type=pathlib.Path)
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--attention", default="eager", help="eager, as the reference's; or sdpa")
    a = ap.parse_args()
    transformers.logging.set_verbosity_error()
    for path in a.dirs:
        print(json.dumps(errors(path, a.device, a.attention)), flush=True)


main()
