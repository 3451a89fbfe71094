#!/usr/bin/env python3
"""Add to Hugging Face checkpoints what `transformers` writes behind some prompts, greedily.

    pip install torch transformers safetensors
    hf_continuations.py DIR [DIR ...] [--seed N] [--tokens N]

Each DIR (as hf_reference.py makes it) gets continuations.json: prompts of different lengths as token ids, and the ids that
generate(do_sample=False) appends to each, without an end token so that all are equally long. Of a model with encoder and decoder,
the prompt is the encoder's, and the ids are those behind the token that starts the decoder. Float32 on the CPU, eager attention.
"""
import argparse, json, pathlib, torch, transformers

ap = argparse.ArgumentParser(); ap.add_argument("dirs", nargs="+"); ap.add_argument("--seed", type=int, default=0)
ap.add_argument("--tokens", type=int, default=24); a = ap.parse_args()
for d in map(pathlib.Path, a.dirs):
    config = json.load(open(d / "config.json")); both = config.get("is_encoder_decoder")
    alibi = config.get("alibi")  # eager attention of Falcon adds it twice
    cls = transformers.AutoModelForSeq2SeqLM if both else transformers.AutoModelForCausalLM
    model = cls.from_pretrained(d, dtype=torch.float32, attn_implementation="sdpa" if alibi else "eager").eval()
    g = torch.Generator().manual_seed(a.seed)
    rope = getattr(model.config, "rope_parameters", None) or {}
    growth = rope["factor"] if rope.get("rope_type") == "dynamic" else 1  # dynamic NTK is for sequences beyond the limit
    longest = 40 if both else int(model.config.max_position_embeddings * growth) - a.tokens
    prompts, written, gaps = [], [], []
    for n in (1, 5, 12, min(40, longest)):
        ids = torch.randint(3, model.config.vocab_size, (1, n), generator=g)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=a.tokens,
                             use_cache=not both,  # Transformers has as many caches as encoder layers
                             eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
        top = torch.stack(out.logits).topk(2).values  # how clear the choices were: a near tie would test nothing but rounding
        gaps.append(float((top[..., 0] - top[..., 1]).min()))
        prompts.append(ids[0].tolist()); written.append(out.sequences[0, 1 if both else n:].tolist())
    json.dump(dict(seed=a.seed, transformers=transformers.__version__, torch=torch.__version__, smallest_gap=min(gaps),
                   prompts=prompts, continuations=written), open(d / "continuations.json", "w"))
    print(f"{d.name}: smallest gap between the two likeliest {min(gaps):.2e}")
