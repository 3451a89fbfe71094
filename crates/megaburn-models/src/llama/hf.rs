use crate::{
    Llama,
    hf::{HfKeys, HfSource},
};

impl HfKeys for Llama {
    fn hf_source(path: &str) -> Option<HfSource> {
        if let Some(name) = match path {
            "embedding.weight" => Some("model.embed_tokens.weight"),
            "norm.gamma" => Some("model.norm.weight"),
            "head.weight" => Some("lm_head.weight"),
            _ => None,
        } {
            return Some(HfSource::plain(name));
        }
        let (index, field) = path.strip_prefix("blocks.")?.split_once('.')?;
        let layer = format!("model.layers.{index}");
        let columns = |module: &str, names: &[&str]| {
            HfSource::columns(names.iter().map(|name| format!("{layer}.{module}.{name}.weight")))
        };
        Some(match field {
            "attention_norm.gamma" => HfSource::plain(format!("{layer}.input_layernorm.weight")),
            "mlp_norm.gamma" => HfSource::plain(format!("{layer}.post_attention_layernorm.weight")),
            "attention.qkv.weight" => columns("self_attn", &["q_proj", "k_proj", "v_proj"]),
            "attention.output.weight" => columns("self_attn", &["o_proj"]),
            "mlp.gate_up.weight" => columns("mlp", &["gate_proj", "up_proj"]),
            "mlp.down.weight" => columns("mlp", &["down_proj"]),
            _ => return None,
        })
    }
}
