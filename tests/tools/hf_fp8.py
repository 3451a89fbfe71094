#!/usr/bin/env python3
"""Write a fixture with FP8 weights and what `transformers` computes from it, or load an exported one.

    pip install torch transformers safetensors accelerate compressed-tensors
    hf_fp8.py write OUT_DIR FORM FAMILY [key=value config overrides ...] [--block ROWS COLS] [--scales float32|bfloat16]
    hf_fp8.py load DIR [PLAIN_DIR]

`write` quantises the linear layers of a tiny random model of hf_reference.py with PyTorch's own cast, as `block` (fp8 of DeepSeek-V3),
`channel` or `tensor` (compressed-tensors), has `transformers` load the result with its own dequantisation in float32, and writes
reference.safetensors and reference.json as hf_reference.py does. The fixtures are:
    fp8-deepseek-v3: block deepseek-v3 vocab_size=64 hidden_size=32 intermediate_size=48 num_attention_heads=4 num_key_value_heads=4
        moe_intermediate_size=16 n_routed_experts=4 n_group=2 topk_group=1 --block 8 16
    fp8-llama: channel llama3-scaled vocab_size=64

`load` checks a folder of `megaburn convert export --quantize`: `transformers` loads it as it is, with no tensor missing, left over or of
another shape, and dequantised; then its weights are those that PyTorch computes from codes and scales, and it computes finite logits. With PLAIN_DIR, an export without --quantize, it prints how far the two are apart.
"""
import argparse, json, pathlib, torch, transformers
from safetensors.torch import load_file, save_file
from hf_reference import FAMILIES, reference

NOT_LINEAR = ("embed", "norm", "lm_head", "mlp.gate.weight", "eh_proj", "shared_expert_gate", "head")

def blocks(w, rows, cols):
    """The largest magnitude of each block."""
    out, inner = w.shape
    padded = torch.nn.functional.pad(w.abs(), (0, -inner % cols, 0, -out % rows))
    return padded.reshape(-(-out // rows), rows, -(-inner // cols), cols).amax((1, 3))

def widened(scales, rows, cols, shape):
    return scales.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(cols, 1)[:, : shape[1]]

def quantized(w, form, block, dtype):
    rows, cols = {"block": block, "channel": (1, w.shape[1]), "tensor": w.shape}[form]
    scales = (blocks(w, rows, cols) / 448).clamp(min=1e-12).to(dtype)
    codes = (w / widened(scales.float(), rows, cols, w.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales.reshape(1) if form == "tensor" else scales

def quantization_config(form, block):
    if form == "block":
        return dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=list(block))
    weights = dict(num_bits=8, type="float", strategy=form, symmetric=True, dynamic=False)
    inputs = dict(num_bits=8, type="float", strategy="token", symmetric=True, dynamic=True)
    groups = dict(group_0=dict(targets=["Linear"], weights=weights, input_activations=inputs))
    return dict(quant_method="compressed-tensors", format="float-quantized", quantization_status="compressed", config_groups=groups, ignore=["lm_head"])

def auto_class(folder):
    """The class of the model: that of `config.json` if it is no decoder (BERT)."""
    architecture = json.load(open(folder / "config.json"))["architectures"][0]
    return transformers.AutoModelForCausalLM if "CausalLM" in architecture else getattr(transformers, architecture)

def load_quantized(folder):
    """Loads the model without dequantising it. Without a GPU `transformers` dequantises `fp8` all the same."""
    _, info = auto_class(folder).from_pretrained(folder, output_loading_info=True)
    wrong = {k: v for k, v in info.items() if v and k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")}
    # These layers of DeepSeek's are read by serving engines only.
    layers = json.load(open(folder / "config.json")).get("num_hidden_layers", 0)
    is_read = lambda name: not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    wrong["unexpected_keys"] = [name for name in wrong.get("unexpected_keys", ()) if is_read(name)]
    assert not any(wrong.values()), wrong

def loaded(folder):
    """The model as `transformers` dequantises it."""
    method = json.load(open(folder / "config.json")).get("quantization_config", {}).get("quant_method")
    kw = {}
    if method == "fp8": kw = dict(quantization_config=transformers.FineGrainedFP8Config(dequantize=True))
    if method == "compressed-tensors": kw = dict(quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    return auto_class(folder).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **kw).eval()

def logits(model, seed, batch, seq):
    torch.manual_seed(seed); ids = torch.randint(3, model.config.vocab_size, (batch, seq))
    with torch.no_grad(): r = model(input_ids=ids)
    scores = getattr(r, "logits", None); scores = r.prediction_logits if scores is None else scores
    return ids, scores.float().contiguous(), torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

def write(a):
    out = pathlib.Path(a.out); out.mkdir(parents=True, exist_ok=True); tensors = {}
    config_name, model_name, kw = FAMILIES[a.family]
    kw.update({k: json.loads(v) for k, v in (o.split("=", 1) for o in a.overrides)})
    torch.manual_seed(0); config = getattr(transformers, config_name)(**kw, attn_implementation="eager"); Model = getattr(transformers, model_name)
    model = Model(config).float()
    for n, p in model.named_parameters(): torch.nn.init.normal_(p, 1.0 if "norm" in n else 0.0, 0.1 if p.dim() == 1 else 0.08)
    for n, b in model.named_buffers():
        if n.endswith("e_score_correction_bias"): torch.nn.init.normal_(b, 0.0, 0.05)
    model.save_pretrained(out); dtype = getattr(torch, a.scales)
    for name, w in load_file(out / "model.safetensors").items():
        if w.dim() != 2 or any(part in name for part in NOT_LINEAR): tensors[name] = w.bfloat16() if w.dim() == 2 else w; continue
        codes, scales = quantized(w, a.form, a.block, dtype)
        tensors[name] = codes; tensors[name + ("_scale_inv" if a.form == "block" else "_scale")] = scales
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / "model.safetensors", metadata=dict(format="pt"))
    written = json.load(open(out / "config.json")); written["dtype"] = "bfloat16"
    written["quantization_config"] = quantization_config(a.form, a.block)
    json.dump(written, open(out / "config.json", "w"), indent=2)
    # The gradients are those of a plain model with the weights that `transformers` dequantised.
    plain = Model(config).float().train(); plain.load_state_dict(loaded(out).state_dict())
    ids = torch.randint(3, config.vocab_size, (2, 16))
    t, scale = reference(plain, dict(input_ids=ids), lambda: dict(labels=ids.clone()), 4)
    save_file({k: v.contiguous() for k, v in t.items()}, out / "reference.safetensors")
    json.dump(dict(family=a.family, torch=torch.__version__, transformers=transformers.__version__, gradient_scale=scale, optimizer=dict(name="AdamW", lr=1e-3,
        betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, clip=None)), open(out / "reference.json", "w"), indent=1)
    print(f"{out}: {len(tensors)} tensors, loss {t['loss'].item():.6f}")

def load(a):
    folder = pathlib.Path(a.dir); stored = {}
    for file in sorted(folder.glob("*.safetensors")): stored.update(load_file(file))
    load_quantized(folder); model = loaded(folder); weights = dict(model.named_parameters()); compared = different = 0
    block = json.load(open(folder / "config.json"))["quantization_config"].get("weight_block_size")
    for name, codes in stored.items():
        if codes.dtype != torch.float8_e4m3fn or name not in weights: continue
        scales = stored.get(name + "_scale_inv", stored.get(name + "_scale"))
        rows, cols = block or ((1, codes.shape[1]) if scales.numel() > 1 else codes.shape)
        # compressed-tensors multiplies in the type of the scales.
        scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
        expected = (codes.to(scales.dtype) * widened(scales, rows, cols, codes.shape)).float()
        compared += 1; different += not torch.equal(expected, weights[name].float())
    _, found, loss = logits(model, 0, 2, 16)
    assert found.isfinite().all() and compared and not different, (compared, different)
    print(f"{folder}: {compared} FP8 weights are loaded as they are stored, loss {loss.item():.6f}")
    if a.plain:
        _, plain, plain_loss = logits(loaded(pathlib.Path(a.plain)), 0, 2, 16)
        print(f"{a.plain}: loss {plain_loss.item():.6f}; logits are {(found - plain).norm() / plain.norm():.4f} of their norm apart")

def main():
    ap = argparse.ArgumentParser(); sub = ap.add_subparsers(required=True)
    w = sub.add_parser("write"); w.set_defaults(run=write)
    w.add_argument("out"); w.add_argument("form", choices=["block", "channel", "tensor"]); w.add_argument("family", choices=FAMILIES)
    w.add_argument("--block", type=int, nargs=2, default=(128, 128)); w.add_argument("--scales", default="float32"); w.add_argument("overrides", nargs="*")
    r = sub.add_parser("load"); r.set_defaults(run=load); r.add_argument("dir"); r.add_argument("plain", nargs="?")
    a = ap.parse_args(); a.run(a)

if __name__ == "__main__":
    main()
