//! Falcon: rotary positions or ALiBi, one key/value head or some, and an MLP next to the attention.
//!
//! The models of 7B have one norm for attention and MLP. Those of the new decoder architecture,
//! such as 40B and 180B, have one for each, and groups of query heads with a key/value head each.
//!
//! Source: Almazrouei et al., "The Falcon series of open language models" (2023),
//! <https://arxiv.org/abs/2311.16867>.

use megaburn_parallel::{Activation, Alibi, NormKind};
use serde_json::{Value, json};

use super::{
    Family, FamilySpec, HfJson, KeyDefault, Meaning, gpt2, llama, rotary::rope_parameters,
};
use crate::{
    decoder::{BlockOrder, DecoderConfig, Positions},
    hf::Key,
};

pub(super) const SPEC: FamilySpec = FamilySpec {
    model_type: "falcon",
    architecture: "FalconForCausalLM",
    other_architectures: &[],
    description: "Falcon 7B, 11B, 40B and 180B.",
    keys: &[KEYS],
    optional_prefix: "transformer.",
    constants: &[".rotary.inv_freq", ".rotary_emb.inv_freq"],
    layer: "transformer.h.*.",
    defaults: &[DEFAULTS],
    template,
    follow: |_| {},
    read,
    write,
};

fn template() -> DecoderConfig {
    DecoderConfig {
        family: Family::FALCON,
        ffn: 512,
        kv_heads: 1,
        norm: NormKind::Layer,
        block_order: BlockOrder::ParallelSharedNorm,
        activation: Activation::Gelu,
        tied: true,
        ..llama::template()
    }
}

const DEFAULTS: &[KeyDefault] = &[
    KeyDefault::same("max_position_embeddings", Meaning::Size(2048)),
    // Defaults to four times the width.
    KeyDefault::same("ffn_hidden_size", Meaning::Nothing),
    KeyDefault::or_nothing("activation", Meaning::Text("gelu")),
    KeyDefault::or_nothing("layer_norm_epsilon", Meaning::Number(1e-5)),
    KeyDefault::or_false("bias", false),
    KeyDefault::or_false("alibi", false),
    KeyDefault::or_false("new_decoder_architecture", false),
    KeyDefault::or_false("multi_query", true),
    KeyDefault::or_false("parallel_attn", true),
    // Defaults to the number of query heads.
    KeyDefault::same("num_kv_heads", Meaning::Nothing),
    // Defaults to two in the new decoder architecture, otherwise one.
    KeyDefault::same("num_ln_in_parallel_attn", Meaning::Nothing),
    KeyDefault::same("rope_theta", Meaning::Number(10_000.0)),
    KeyDefault::same("tie_word_embeddings", Meaning::Flag(true)),
];

const KEYS: &[Key] = &[
    Key::plain("embedding.weight", "transformer.word_embeddings.weight"),
    Key::plain("norm.gamma", "transformer.ln_f.weight"),
    Key::plain("norm.beta", "transformer.ln_f.bias"),
    Key::plain("head.weight", "lm_head.weight"),
    // The norms of attention and MLP, if both are applied to the same input.
    Key::plain(
        "blocks.*.attention_norm.gamma",
        "transformer.h.*.ln_attn.weight",
    )
    .of_order(BlockOrder::Parallel),
    Key::plain(
        "blocks.*.attention_norm.beta",
        "transformer.h.*.ln_attn.bias",
    )
    .of_order(BlockOrder::Parallel),
    Key::plain("blocks.*.mlp_norm.gamma", "transformer.h.*.ln_mlp.weight")
        .of_order(BlockOrder::Parallel),
    Key::plain("blocks.*.mlp_norm.beta", "transformer.h.*.ln_mlp.bias")
        .of_order(BlockOrder::Parallel),
    // The norms of attention and MLP in the other models.
    Key::plain(
        "blocks.*.attention_norm.gamma",
        "transformer.h.*.input_layernorm.weight",
    ),
    Key::plain(
        "blocks.*.attention_norm.beta",
        "transformer.h.*.input_layernorm.bias",
    ),
    Key::plain(
        "blocks.*.mlp_norm.gamma",
        "transformer.h.*.post_attention_layernorm.weight",
    ),
    Key::plain(
        "blocks.*.mlp_norm.beta",
        "transformer.h.*.post_attention_layernorm.bias",
    ),
    Key::grouped_qkv(
        "blocks.*.attention.qkv.weight",
        "transformer.h.*.self_attention.query_key_value.weight",
    ),
    Key::grouped_qkv(
        "blocks.*.attention.qkv.bias",
        "transformer.h.*.self_attention.query_key_value.bias",
    ),
    Key::linear(
        "blocks.*.attention.output.weight",
        &["transformer.h.*.self_attention.dense.weight"],
    ),
    Key::plain(
        "blocks.*.attention.output.bias",
        "transformer.h.*.self_attention.dense.bias",
    ),
    Key::linear(
        "blocks.*.mlp.up.weight",
        &["transformer.h.*.mlp.dense_h_to_4h.weight"],
    ),
    Key::plain(
        "blocks.*.mlp.up.bias",
        "transformer.h.*.mlp.dense_h_to_4h.bias",
    ),
    Key::linear(
        "blocks.*.mlp.down.weight",
        &["transformer.h.*.mlp.dense_4h_to_h.weight"],
    ),
    Key::plain(
        "blocks.*.mlp.down.bias",
        "transformer.h.*.mlp.dense_4h_to_h.bias",
    ),
];

fn read(json: &HfJson<'_>) -> Result<DecoderConfig, String> {
    let hidden = json.size("hidden_size")?;
    let heads = json.size("num_attention_heads")?;
    if heads == 0 || !hidden.is_multiple_of(heads) {
        return Err(format!(
            "`hidden_size` {hidden} is not a multiple of `num_attention_heads` {heads}"
        ));
    }
    let bias = json.flag("bias")?;
    json.only("head_dim", hidden / heads)?;
    Ok(DecoderConfig {
        vocab: json.size("vocab_size")?,
        hidden,
        ffn: json.optional_size("ffn_hidden_size")?.unwrap_or(4 * hidden),
        layers: json.layers("num_hidden_layers")?,
        heads,
        kv_heads: kv_heads(json, heads)?,
        head_dim: hidden / heads,
        max_seq_len: json.size("max_position_embeddings")?,
        positions: if json.flag("alibi")? {
            Positions::Alibi(Alibi::new().with_scaled(true))
        } else {
            Positions::Rotary(json.rotary()?)
        },
        norm_eps: json.number("layer_norm_epsilon")?,
        block_order: block_order(json)?,
        activation: gpt2::activation(json, "activation")?,
        qkv_bias: bias,
        output_bias: bias,
        mlp_bias: bias,
        tied: json.flag("tie_word_embeddings")?,
        ..template()
    })
}

/// The number of key/value heads: `num_kv_heads` in the new decoder architecture, otherwise one
/// with `multi_query`, otherwise as many as query heads.
fn kv_heads(json: &HfJson<'_>, heads: usize) -> Result<usize, String> {
    let named = json.optional_size("num_kv_heads")?.unwrap_or(heads);
    if json.flag("new_decoder_architecture")? {
        return Ok(named);
    }
    if json.flag("multi_query")? {
        return Ok(1);
    }
    if named != heads {
        return Err(format!(
            "`num_kv_heads` is {named} for {heads} query heads, which needs \
            `new_decoder_architecture` true"
        ));
    }
    Ok(heads)
}

/// The order of attention and MLP, and how many norms they have.
fn block_order(json: &HfJson<'_>) -> Result<BlockOrder, String> {
    let is_new = json.flag("new_decoder_architecture")?;
    let num_norms = json.optional_size("num_ln_in_parallel_attn")?;
    match (json.flag("parallel_attn")?, is_new, num_norms) {
        (true, true, None | Some(2)) => Ok(BlockOrder::Parallel),
        (true, true, Some(1)) | (true, false, None | Some(1)) => Ok(BlockOrder::ParallelSharedNorm),
        (false, false, _) => Ok(BlockOrder::Serial),
        (false, true, _) => Err(
            "`parallel_attn` is false, which the new decoder architecture does not support: \
            Transformers' model has no norms for it"
                .into(),
        ),
        (true, _, Some(num_norms)) => Err(format!(
            "`num_ln_in_parallel_attn` is {num_norms}, but must be 1, or 2 with \
            `new_decoder_architecture` true"
        )),
    }
}

fn write(config: &DecoderConfig) -> Value {
    let order = config.block_order;
    let is_grouped = ![1, config.heads].contains(&config.kv_heads);
    let is_new = order == BlockOrder::Parallel || is_grouped;
    let num_norms = match (is_new, order) {
        (false, _) => Value::Null,
        (true, BlockOrder::Parallel) => 2.into(),
        (true, _) => 1.into(),
    };
    json!({
        "activation": gpt2::activation_name(config.activation),
        "alibi": config.positions.alibi().is_some(),
        "bias": config.mlp_bias,
        "ffn_hidden_size": config.ffn,
        "hidden_size": config.hidden,
        "layer_norm_epsilon": config.norm_eps,
        "max_position_embeddings": config.max_seq_len,
        "multi_query": config.kv_heads == 1,
        "new_decoder_architecture": is_new,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_kv_heads": config.kv_heads,
        "num_ln_in_parallel_attn": num_norms,
        "parallel_attn": order != BlockOrder::Serial,
        "rope_parameters": rope_parameters(&config.positions),
    })
}
