//! T5: an encoder and a decoder that attends to its output, with a relative bias of attention
//! scores, RMS norms, no biases, and scores without a factor. The MLP is gated in version 1.1 and
//! has ReLU in version 1.0, whose logits are scaled by `d_model^-0.5`.
//!
//! Source: Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text
//! transformer" (2020), <https://arxiv.org/abs/1910.10683>; Shazeer, "GLU variants improve
//! transformer" (2020) for version 1.1; Transformers `models/t5/modeling_t5.py`. Dropout follows the
//! run's configuration, whatever `config.json` says.

use megaburn_parallel::{Activation, NormKind};
use serde_json::{Value, json};

use super::{Family, FamilySpec, HfJson, KeyDefault, Meaning, llama};
use crate::{
    decoder::{DecoderConfig, Multipliers, Positions, Relative},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "t5",
    architecture: "T5ForConditionalGeneration",
    other_architectures: &["T5WithLMHeadModel"],
    description: "T5, version 1.0 and 1.1, and FLAN-T5: an encoder and a decoder.",
    keys: &[KEYS],
    optional_prefix: "",
    constants: CONSTANTS,
    layer: "decoder.block.*.",
    defaults: &[DEFAULTS],
    template,
    follow: |_| {},
    read,
    write,
};

/// mT5 has the block of T5 1.1, and never scales logits.
pub(super) const MT5: FamilySpec = FamilySpec {
    model_type: "mt5",
    architecture: "MT5ForConditionalGeneration",
    other_architectures: &[],
    description: "mT5: T5 1.1 for many languages.",
    defaults: &[MT5_DEFAULTS, DEFAULTS],
    read: |json| read_sizes(json, false),
    write: write_sizes,
    ..SPEC
};

/// A fresh model is of version 1.1.
fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::T5,
        ffn: 256,
        encoder_layers: 2,
        kv_heads: 4,
        positions: Positions::Relative(Relative::default()),
        norm_eps: 1e-6,
        norm: NormKind::Rms,
        activation: Activation::GeGluTanh,
        attention_scale: Some(1.0),
        ..llama::template()
    }
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::same("d_kv", Meaning::Size(64)),
    // Defaults to `num_layers`.
    KeyDefault::same("num_decoder_layers", Meaning::Nothing),
    KeyDefault::same("relative_attention_num_buckets", Meaning::Size(32)),
    KeyDefault::same("relative_attention_max_distance", Meaning::Size(128)),
    KeyDefault::same("layer_norm_epsilon", Meaning::Number(1e-6)),
    KeyDefault::same("feed_forward_proj", Meaning::Text("relu")),
    KeyDefault::same("tie_word_embeddings", Meaning::Flag(true)),
];

const MT5_DEFAULTS: &[KeyDefault] = &[KeyDefault::same(
    "feed_forward_proj",
    Meaning::Text("gated-gelu"),
)];

/// Copies of the embedding, and a table that no version of the model reads, in older checkpoints.
const CONSTANTS: &[&str] = &[
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    ".EncDecAttention.relative_attention_bias.weight",
];

const KEYS: &[Key] = &[
    Key::plain("embedding.weight", "shared.weight"),
    Key::plain("head.weight", "lm_head.weight"),
    Key::plain(
        "encoder_bias.weight",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ),
    Key::plain(
        "decoder_bias.weight",
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ),
    Key::plain(
        "blocks.*.encoder_norm.gamma",
        "encoder.final_layer_norm.weight",
    ),
    Key::plain("norm.gamma", "decoder.final_layer_norm.weight"),
    Key::plain(
        "blocks.*.attention_norm.gamma",
        "encoder.block.*.layer.0.layer_norm.weight",
    )
    .of_encoder(),
    Key::plain(
        "blocks.*.attention_norm.gamma",
        "decoder.block.*.layer.0.layer_norm.weight",
    )
    .of_decoder(),
    Key::linear(
        "blocks.*.attention.qkv.weight",
        &[
            "encoder.block.*.layer.0.SelfAttention.q.weight",
            "encoder.block.*.layer.0.SelfAttention.k.weight",
            "encoder.block.*.layer.0.SelfAttention.v.weight",
        ],
    )
    .of_encoder(),
    Key::linear(
        "blocks.*.attention.qkv.weight",
        &[
            "decoder.block.*.layer.0.SelfAttention.q.weight",
            "decoder.block.*.layer.0.SelfAttention.k.weight",
            "decoder.block.*.layer.0.SelfAttention.v.weight",
        ],
    )
    .of_decoder(),
    Key::linear(
        "blocks.*.attention.output.weight",
        &["encoder.block.*.layer.0.SelfAttention.o.weight"],
    )
    .of_encoder(),
    Key::linear(
        "blocks.*.attention.output.weight",
        &["decoder.block.*.layer.0.SelfAttention.o.weight"],
    )
    .of_decoder(),
    Key::plain(
        "blocks.*.cross_attention_norm.gamma",
        "decoder.block.*.layer.1.layer_norm.weight",
    )
    .of_decoder(),
    Key::linear(
        "blocks.*.cross_attention.q.weight",
        &["decoder.block.*.layer.1.EncDecAttention.q.weight"],
    )
    .of_decoder(),
    Key::linear(
        "blocks.*.cross_attention.kv.weight",
        &[
            "decoder.block.*.layer.1.EncDecAttention.k.weight",
            "decoder.block.*.layer.1.EncDecAttention.v.weight",
        ],
    )
    .of_decoder(),
    Key::linear(
        "blocks.*.cross_attention.output.weight",
        &["decoder.block.*.layer.1.EncDecAttention.o.weight"],
    )
    .of_decoder(),
    Key::plain(
        "blocks.*.mlp_norm.gamma",
        "encoder.block.*.layer.1.layer_norm.weight",
    )
    .of_encoder(),
    Key::plain(
        "blocks.*.mlp_norm.gamma",
        "decoder.block.*.layer.2.layer_norm.weight",
    )
    .of_decoder(),
    Key::linear(
        "blocks.*.mlp.up.weight",
        &[
            "encoder.block.*.layer.1.DenseReluDense.wi_0.weight",
            "encoder.block.*.layer.1.DenseReluDense.wi_1.weight",
        ],
    )
    .of_encoder()
    .if_gated(true),
    Key::linear(
        "blocks.*.mlp.up.weight",
        &[
            "decoder.block.*.layer.2.DenseReluDense.wi_0.weight",
            "decoder.block.*.layer.2.DenseReluDense.wi_1.weight",
        ],
    )
    .of_decoder()
    .if_gated(true),
    Key::linear(
        "blocks.*.mlp.up.weight",
        &["encoder.block.*.layer.1.DenseReluDense.wi.weight"],
    )
    .of_encoder()
    .if_gated(false),
    Key::linear(
        "blocks.*.mlp.up.weight",
        &["decoder.block.*.layer.2.DenseReluDense.wi.weight"],
    )
    .of_decoder()
    .if_gated(false),
    Key::linear(
        "blocks.*.mlp.down.weight",
        &["encoder.block.*.layer.1.DenseReluDense.wo.weight"],
    )
    .of_encoder(),
    Key::linear(
        "blocks.*.mlp.down.weight",
        &["decoder.block.*.layer.2.DenseReluDense.wo.weight"],
    )
    .of_decoder(),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    // Version 5 of Transformers ties the embeddings of all models, and says by a key of its own
    // whether logits are scaled.
    let tied = json.flag("tie_word_embeddings")?;
    let is_scaled = json.optional_flag("scale_decoder_outputs")?;
    read_sizes(json, is_scaled.unwrap_or(tied))
}

/// Reads a model whose logits are scaled or not.
fn read_sizes(json: &HfJson<'_>, is_scaled: bool) -> Result<DecoderConfig, String> {
    json.only("is_encoder_decoder", true)?;
    let hidden = json.size("d_model")?;
    let heads = json.size("num_heads")?;
    let encoder_layers = json.layers("num_layers")?;
    let decoder_layers = json
        .optional_layers("num_decoder_layers")?
        .unwrap_or(encoder_layers);
    for (key, layers) in [
        ("num_layers", encoder_layers),
        ("num_decoder_layers", decoder_layers),
    ] {
        if layers == 0 {
            return Err(format!("`{key}` is 0, but must be at least 1"));
        }
    }
    Ok(DecoderConfig {
        vocab: json.size("vocab_size")?,
        hidden,
        ffn: json.size("d_ff")?,
        layers: encoder_layers + decoder_layers,
        encoder_layers,
        heads,
        kv_heads: heads,
        head_dim: json.size("d_kv")?,
        // Relative positions have no limit; this is the length of the published models' samples.
        max_seq_len: json.optional_size("n_positions")?.unwrap_or(512),
        positions: Positions::Relative(Relative {
            num_buckets: json.size("relative_attention_num_buckets")?,
            max_distance: json.size("relative_attention_max_distance")?,
        }),
        norm_eps: json.number("layer_norm_epsilon")?,
        activation: activation(json)?,
        tied: json.flag("tie_word_embeddings")?,
        multipliers: Multipliers {
            // The factor `d_model^-0.5` of version 1.0.
            logits_scaling: if is_scaled {
                (hidden as f64).sqrt()
            } else {
                1.0
            },
            ..Multipliers::default()
        },
        ..template()
    })
}

/// The activation functions: whether they are gated, their names, the one that is written first, and
/// their parts.
const ACTIVATIONS: [(bool, &str, Activation); 11] = [
    (true, "gelu_new", Activation::GeGluTanh),
    (true, "gelu_pytorch_tanh", Activation::GeGluTanh),
    (true, "gelu", Activation::GeGlu),
    (true, "silu", Activation::SwiGlu),
    (true, "swish", Activation::SwiGlu),
    (false, "relu", Activation::Relu),
    (false, "gelu_new", Activation::GeluTanh),
    (false, "gelu_pytorch_tanh", Activation::GeluTanh),
    (false, "gelu", Activation::Gelu),
    (false, "relu2", Activation::SquaredRelu),
    (false, "relu_squared", Activation::SquaredRelu),
];

/// Reads the activation function. `dense_act_fn` and `is_gated_act` are made from
/// `feed_forward_proj`, unless they are there, too.
fn activation(json: &HfJson<'_>) -> Result<Activation, String> {
    let whole = json.text("feed_forward_proj")?;
    let (gated, name) = match whole.strip_prefix("gated-") {
        Some("gelu") => (true, "gelu_new"),
        Some(name) => (true, name),
        None => (false, whole.as_str()),
    };
    let gated = json.optional_flag("is_gated_act")?.unwrap_or(gated);
    let name = json
        .optional_text("dense_act_fn")?
        .unwrap_or_else(|| name.into());
    let found = ACTIVATIONS
        .iter()
        .find(|(of_gated, known, _)| *of_gated == gated && *known == name);
    found.map(|(.., activation)| *activation).ok_or_else(|| {
        let known = ACTIVATIONS
            .iter()
            .filter(|(of_gated, ..)| *of_gated == gated);
        let known: Vec<&str> = known.map(|(_, known, _)| *known).collect();
        let kind = if gated {
            "gated MLPs"
        } else {
            "MLPs without a gate"
        };
        format!(
            "`feed_forward_proj` is {whole} with the function {name}; {kind} support {}",
            known.join(", ")
        )
    })
}

fn write(config: &DecoderConfig) -> Value {
    let mut json = write_sizes(config);
    json["scale_decoder_outputs"] = (config.multipliers.logits_scaling != 1.0).into();
    json
}

/// The inverse of [`read_sizes`], without whether logits are scaled.
fn write_sizes(config: &DecoderConfig) -> Value {
    let relative = config.positions.relative().unwrap_or_default();
    let found = ACTIVATIONS
        .iter()
        .find(|(.., activation)| *activation == config.activation);
    let (gated, name) = found.map_or((false, "relu"), |(gated, name, _)| (*gated, *name));
    json!({
        "d_ff": config.ffn,
        "d_kv": config.head_dim,
        "d_model": config.hidden,
        "dense_act_fn": name,
        "feed_forward_proj": match (gated, name) {
            (true, "gelu_new") => "gated-gelu".into(),
            (true, name) => format!("gated-{name}"),
            (false, name) => name.into(),
        },
        "is_encoder_decoder": true,
        "is_gated_act": gated,
        "layer_norm_epsilon": config.norm_eps,
        "n_positions": config.max_seq_len,
        "num_decoder_layers": config.layers - config.encoder_layers,
        "num_heads": config.heads,
        "num_layers": config.encoder_layers,
        "relative_attention_max_distance": relative.max_distance,
        "relative_attention_num_buckets": relative.num_buckets,
    })
}
