//! The `megaburn` command with one more model family: Phi-1.5 and Phi-2. Attention and MLP read the
//! same norm in parallel, half of each head is rotated, and the logits have a bias.
//!
//! Source: Li et al., "Textbooks are all you need II: phi-1.5 technical report" (2023).

use std::process::ExitCode;

use megaburn::{cli::Cli, family::*};

struct Phi;

impl ModelFamily for Phi {
    fn model_type(&self) -> &'static str {
        "phi"
    }
    fn architecture(&self) -> &'static str {
        "PhiForCausalLM"
    }
    fn template(&self) -> DecoderConfig {
        DecoderConfig {
            kv_heads: 4,
            positions: Positions::Rotary(Rotary::new(10_000.0).with_percent(0.5)),
            norm: NormKind::Layer,
            block_order: BlockOrder::ParallelSharedNorm,
            activation: Activation::GeluTanh,
            qkv_bias: true,
            output_bias: true,
            mlp_bias: true,
            ..Family::LLAMA.template()
        }
    }
    fn keys(&self) -> &'static [&'static [Key]] {
        &[KEYS, LLAMA_KEYS]
    }
    fn defaults(&self) -> &'static [&'static [KeyDefault]] {
        &[DEFAULTS, LLAMA_DEFAULTS]
    }
    fn read(&self, json: &HfJson<'_>) -> Result<DecoderConfig, String> {
        json.only("hidden_act", "gelu_new")?;
        json.only("qk_layernorm", false)?;
        Ok(DecoderConfig {
            positions: Positions::Rotary(json.partial_rotary(0.5)?),
            norm_eps: json.number("layer_norm_eps")?,
            ..read_plain_sizes(json, self.template())?
        })
    }
    fn write(&self, config: &DecoderConfig) -> Value {
        let mut json = write_llama_sizes(config);
        json["hidden_act"] = "gelu_new".into();
        json["layer_norm_eps"] = config.norm_eps.into();
        write_rotary_percent(&config.positions, &mut json);
        json
    }
    fn head(&self) -> Option<HeadInit> {
        Some(|parts| Ok(FamilyHead::new(parts.vocab_bias()?)))
    }
}

const DEFAULTS: &[KeyDefault] = &[KeyDefault::same("hidden_act", Meaning::Text("gelu_new"))];

/// The tensors that Llama does not have, or names differently.
#[rustfmt::skip]
const KEYS: &[Key] = &[
    Key::plain("norm.gamma", "model.final_layernorm.weight"),
    Key::plain("norm.beta", "model.final_layernorm.bias"),
    Key::plain("blocks.*.attention_norm.beta", "model.layers.*.input_layernorm.bias"),
    Key::linear("blocks.*.attention.output.weight", &["model.layers.*.self_attn.dense.weight"]),
    Key::plain("blocks.*.attention.output.bias", "model.layers.*.self_attn.dense.bias"),
    Key::linear("blocks.*.mlp.up.weight", &["model.layers.*.mlp.fc1.weight"]),
    Key::plain("blocks.*.mlp.up.bias", "model.layers.*.mlp.fc1.bias"),
    Key::linear("blocks.*.mlp.down.weight", &["model.layers.*.mlp.fc2.weight"]),
    Key::plain("blocks.*.mlp.down.bias", "model.layers.*.mlp.fc2.bias"),
    Key::plain("output_head.bias", "lm_head.bias"),
];

fn main() -> ExitCode {
    Cli::new().with_family(&Phi).run()
}
