#!/usr/bin/env python3
"""Write down what Transformers' configuration classes mean by each key of a config.json that is absent or null.

    pip install transformers
    hf_defaults.py tests/fixtures/config-defaults.json

For every family of megaburn the JSON has its class and, key by key, what the class makes of it:
    {"absent": VALUE, "null": VALUE}
VALUE is the value, {"refused": true} where the class does not take null, or {"as": EXPRESSION} where it is another key's value.
A flag that may be null is written as the model uses it: false, because the model only asks whether it is true.
No PyTorch is needed: only configuration classes are made.
"""
import json, sys, transformers

transformers.logging.set_verbosity_error()
CLASSES = {"gpt2": "GPT2Config", "llama": "LlamaConfig", "mistral": "MistralConfig", "mixtral": "MixtralConfig", "qwen2": "Qwen2Config",
           "qwen3": "Qwen3Config", "qwen3_moe": "Qwen3MoeConfig", "deepseek_v2": "DeepseekV2Config", "deepseek_v3": "DeepseekV3Config",
           "gemma2": "Gemma2Config", "gemma3_text": "Gemma3TextConfig", "phi3": "Phi3Config", "olmo2": "Olmo2Config", "olmoe": "OlmoeConfig",
           "granite": "GraniteConfig", "starcoder2": "Starcoder2Config", "nemotron": "NemotronConfig", "gpt_neox": "GPTNeoXConfig",
           "qwen2_moe": "Qwen2MoeConfig", "falcon": "FalconConfig", "bert": "BertConfig", "megatron-bert": "MegatronBertConfig",
           "gpt_oss": "GptOssConfig", "t5": "T5Config", "mt5": "MT5Config"}
# Two models of other sizes: what differs between them is computed.
MODELS = [dict(vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64),
          dict(vocab_size=90, hidden_size=240, intermediate_size=80, num_hidden_layers=3, num_attention_heads=5, max_position_embeddings=32)]
GPT2 = dict(hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head", max_position_embeddings="n_positions")
T5 = dict(hidden_size="d_model", intermediate_size="d_ff", num_hidden_layers="num_layers", num_attention_heads="num_heads")
# Keys that a class moves into rope_parameters.
MOVED = {"rope_theta": "rope_theta"}
GPT_NEOX = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
EXPRESSIONS = {"num_layers": lambda m: m["num_hidden_layers"], "num_attention_heads": lambda m: m["num_attention_heads"], "4 * hidden_size": lambda m: 4 * m["hidden_size"], "hidden_size / num_attention_heads": lambda m: m["hidden_size"] // m["num_attention_heads"]}

def moved(family):
    return {"gpt2": {}, "t5": {}, "mt5": {}, "bert": {}, "megatron-bert": {}, "gpt_neox": GPT_NEOX}.get(family, MOVED)

def sizes(family, model):
    if family == "gpt2":
        return {GPT2.get(k, k): v for k, v in model.items() if k != "intermediate_size"}
    if family in ("t5", "mt5"):
        return {T5.get(k, k): v for k, v in model.items() if k != "max_position_embeddings"}
    if family == "falcon":
        return {k: v for k, v in model.items() if k not in ("intermediate_size", "max_position_embeddings")}
    # Without it the class forgets the window's size.
    return {**model, "use_sliding_window": True} if family.startswith("qwen") else model

def meaning(cls, family, key, change):
    found = []
    for model in MODELS:
        json_ = {**sizes(family, model), **change}
        if key == "use_sliding_window" and not change:
            json_.pop(key)
        try:
            config = cls.from_dict(json_).to_dict()
        except Exception:
            return {"refused": True}
        rope = config.get("rope_parameters") or {}
        rope = rope.get("full_attention", rope)  # of Gemma 3, by the kind of a layer
        found.append(rope.get(moved(family)[key]) if key in moved(family) else config.get(key))
    if key == "layer_types":
        return None  # made of the other keys
    if found[0] == found[1]:
        return found[0]
    matching = [text for text, of in EXPRESSIONS.items() if [of(m) for m in MODELS] == found]
    if not matching:
        sys.exit(f"{family}: {key} becomes {found}, which is no known expression")
    return {"as": matching[0]}

def main():
    common = set(transformers.PreTrainedConfig().to_dict())
    families = {}
    for family, name in CLASSES.items():
        cls = getattr(transformers, name)
        own = set(cls().to_dict()) - common - {"rope_parameters", "transformers_version"}
        own |= {"tie_word_embeddings"} | set(moved(family))
        keys = {}
        for key in sorted(own - (set(sizes(family, MODELS[0])) - {"use_sliding_window"})):
            absent, null = meaning(cls, family, key, {}), meaning(cls, family, key, {key: None})
            if key in moved(family):
                null = {"refused": True}  # the class keeps null, and no model can be made of it
            if isinstance(absent, bool) and null is None:
                null = False
            keys[key] = {"absent": absent, "null": null}
        families[family] = {"class": name, "keys": keys}
    out = {"transformers": transformers.__version__, "families": families}
    with open(sys.argv[1], "w") as file:
        json.dump(out, file, indent=1)
        file.write("\n")

main()
