#!/usr/bin/env python3
"""Write a tiny random DeepSeek-V3 with layers that predict further tokens, and what is learnt from it, as a parity fixture.

    hf_mtp_reference.py OUT_DIR [--depths D] [--seed N] [--bf16]

Transformers passes over such layers, so they are put together here out of its own modules: DeepseekV3DecoderLayer,
DeepseekV3RMSNorm, Linear. OUT_DIR gets config.json and model.safetensors, named as DeepSeek's published checkpoints are, copies
of embedding and output matrix in each of these layers included, and reference.safetensors as hf_reference.py has it, where
    labels        some of them -100 (masked)
    loss          mean over the next tokens that count, of the model alone
    mtp_losses    [N, D] f32: before each of N AdamW steps, of each depth the sum over further tokens that count, divided by as many
                  tokens as `loss`
    grad.<name>   gradient of loss + FACTOR / D * sum of mtp_losses, as are the steps behind train_losses
reference.json has FACTOR as mtp_loss_scaling_factor.

--bf16 also prints what bf16 costs PyTorch there, as benches/peer/hf_bf16_error.py does of other fixtures: the largest differences of
losses over the same steps, with f32 masters whose rounding the model holds.
"""
import argparse, copy, json, pathlib, torch, transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from hf_reference import gradients_as_saved

LAYERS, FACTOR, STEPS = 2, 0.3, 6
SIZES = dict(vocab_size=40, hidden_size=16, num_attention_heads=4, num_key_value_heads=4, intermediate_size=16, max_position_embeddings=32,
             rms_norm_eps=1e-5, moe_intermediate_size=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1,
             first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
             routed_scaling_factor=1.5, norm_topk_prob=True)

class Before(torch.nn.Module):
    """What such a layer has beside a decoder layer's own parts."""
    def __init__(self, config):
        super().__init__()
        norm = lambda: DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        self.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
    def named(self, layer):
        names = {"enorm.weight": "enorm.weight", "hnorm.weight": "hnorm.weight", "eh_proj.weight": "eh_proj.weight", "norm.weight": "shared_head.norm.weight"}
        return {f"model.layers.{layer}.{names[n]}": p for n, p in self.named_parameters()}

def losses(model, before, ids, labels):
    """The loss of the next tokens, its logits, and the losses of each depth."""
    inner, (_, seq) = model.model, ids.shape
    x = inner.embed_tokens(ids)
    place = torch.arange(seq)[None]
    rotations = inner.rotary_emb(x, position_ids=place)
    mask = torch.full((seq, seq), float("-inf")).triu(1)[None, None]
    through = lambda layer, x: (lambda y: y[0] if isinstance(y, tuple) else y)(layer(x, attention_mask=mask, position_ids=place, position_embeddings=rotations))
    for layer in inner.layers[:LAYERS]: x = through(layer, x)
    h = inner.norm(x)
    logits = model.lm_head(h)
    count = (labels[:, 1:] != -100).sum()
    # Token i is asked for label i + 1 + k.
    summed = lambda logits, k: cross_entropy(logits[:, : seq - 1 - k].flatten(0, 1), labels[:, 1 + k :].flatten(), ignore_index=-100, reduction="sum")
    main, further = summed(logits, 0) / count, []
    for k, (own, layer) in enumerate(zip(before, inner.layers[LAYERS:]), 1):
        ahead = torch.cat([ids[:, k:], torch.full_like(ids[:, :k], 7)], 1)  # the last are seen by no token that counts
        y = own.eh_proj(torch.cat([own.enorm(inner.embed_tokens(ahead)), own.hnorm(h)], -1))
        h = own.norm(through(layer, y))
        further.append(summed(model.lm_head(h), k) / count)
    return main, logits, further

def optimizer(params):
    decay, rest = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    return torch.optim.AdamW([dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0)], lr=1e-3, betas=(0.9, 0.95), eps=1e-8)

def bf16_errors(model, before, ids, labels, want, want_ahead):
    own = [*model.parameters(), *before.parameters()]
    masters = [torch.nn.Parameter(p.detach().clone()) for p in own]
    model, before, opt, worst = model.bfloat16(), before.bfloat16(), optimizer(masters), [0.0, 0.0]
    model.set_experts_implementation("eager")  # torch's grouped products refuse rows this short
    for main, ahead in zip(want, want_ahead):
        model.zero_grad(); before.zero_grad(); loss, _, further = losses(model, before, ids, labels)
        worst = [max(worst[0], abs(loss.item() - main)), max(worst[1], *(abs(f.item() - a) for f, a in zip(further, ahead)))]
        (loss + FACTOR / len(further) * sum(further)).backward()
        for p, m in zip(own, masters): m.grad = None if p.grad is None else p.grad.float()
        opt.step()
        with torch.no_grad():
            for p, m in zip(own, masters): p.copy_(m)
    print(f"bf16: losses off by up to {worst[0]:.2e}, of further tokens {worst[1]:.2e}")

def main():
    ap = argparse.ArgumentParser(); ap.add_argument("out"); ap.add_argument("--depths", type=int, default=2); ap.add_argument("--seed", type=int, default=0); ap.add_argument("--bf16", action="store_true")
    a = ap.parse_args(); torch.manual_seed(a.seed)
    # Decoder layers of all depths are the last ones of one model, whose file names them as published.
    config = transformers.DeepseekV3Config(**SIZES, num_hidden_layers=LAYERS + a.depths, attn_implementation="eager")
    model = transformers.DeepseekV3ForCausalLM(config).float().train()
    before = torch.nn.ModuleList(Before(config) for _ in range(a.depths))
    params = list(model.named_parameters()) + list(before.named_parameters())
    for n, p in params:
        if p.dim() == 1: torch.nn.init.normal_(p, 1.0 if "norm" in n.lower() else 0.0, 0.1)
        else: torch.nn.init.normal_(p, 0.0, 0.2)
    for n, b in model.named_buffers():
        if n.endswith("e_score_correction_bias"): torch.nn.init.normal_(b, 0.0, 0.05)
    ids = torch.randint(3, config.vocab_size, (4, 16))
    labels = torch.where(torch.rand(ids.shape) < 0.15, -100, ids)
    out = pathlib.Path(a.out); out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    file = load_file(out / "model.safetensors")
    for k, own in enumerate(before):
        file.update({n: p.data.clone() for n, p in own.named(LAYERS + k).items()})
        file[f"model.layers.{LAYERS + k}.embed_tokens.weight"] = file["model.embed_tokens.weight"].clone()
        file[f"model.layers.{LAYERS + k}.shared_head.head.weight"] = file["lm_head.weight"].clone()
    save_file(file, out / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((out / "config.json").read_text())
    said.pop("num_mtp_layers", None); said.pop("mlp_layer_types", None)
    said.update(num_hidden_layers=LAYERS, num_nextn_predict_layers=a.depths)
    (out / "config.json").write_text(json.dumps(said, indent=2) + "\n")

    loss, logits, further = losses(model, before, ids, labels)
    total = lambda loss, further: loss + FACTOR / a.depths * sum(further)
    total(loss, further).backward()
    t = {"logits": logits.detach(), "loss": loss.detach().reshape(1), "input_ids": ids, "labels": labels}
    t.update({f"grad.{n}": g for n, g in gradients_as_saved(model).items()})
    for k, own in enumerate(before): t.update({f"grad.{n}": p.grad.clone() for n, p in own.named(LAYERS + k).items()})
    plain = transformers.DeepseekV3ForCausalLM.from_pretrained(out, attn_implementation="eager").float().train()
    theirs = plain(input_ids=ids, labels=labels)
    assert (theirs.logits - logits).abs().max() < 1e-5 and abs(theirs.loss - loss) < 1e-6, "Transformers computes another main model"
    rounded, opt = copy.deepcopy((model, before)), optimizer([p for _, p in params])
    trained, ahead = [], []
    for _ in range(STEPS):
        opt.zero_grad(); loss, _, further = losses(model, before, ids, labels)
        trained.append(loss.item()); ahead.append([f.item() for f in further]); total(loss, further).backward(); opt.step()
    t["train_losses"], t["mtp_losses"] = torch.tensor(trained), torch.tensor(ahead)
    save_file({k: v.contiguous() for k, v in t.items()}, out / "reference.safetensors")
    json.dump(dict(family="deepseek-v3", seed=a.seed, torch=torch.__version__, transformers=transformers.__version__, mtp_loss_scaling_factor=FACTOR,
        optimizer=dict(name="AdamW", lr=1e-3, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, decay="parameters of rank >= 2", clip=None),
        loss="mean cross entropy over next tokens, and that of further ones; no auxiliary loss; router correction bias frozen"), open(out / "reference.json", "w"), indent=1)
    print(f"loss {trained[0]:.5f}, of further tokens {ahead[0]}, after {STEPS} steps {trained[-1]:.5f} {ahead[-1]}")
    if a.bf16: bf16_errors(*rounded, ids, labels, trained, ahead)

main()
