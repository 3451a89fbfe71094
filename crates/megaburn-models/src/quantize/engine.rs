//! Which models vLLM and SGLang refuse to start in FP8 although Transformers reads them.

use megaburn_checkpoint::hf::HfQuantization;

use crate::{decoder::DecoderConfig, hf::HfParam};

/// Whether a parameter is a weight of a routed expert.
pub(super) fn is_expert(param: &HfParam) -> bool {
    param.path.contains(".moe.experts.")
}

/// The first tensor of a weight, and its number of rows, that engines refuse with scales of blocks;
/// `None` if they take the weight.
///
/// Engines concatenate queries, keys and values, gate and up, and the latent projections of
/// queries and keys. Each of these but the last must end at the end of a block. Of experts the last
/// must as well.
///
/// Source: vLLM `model_executor/layers/quantization/fp8.py` and `utils/fp8_utils.py`,
/// `validate_fp8_block_shape`, without tensor parallelism.
pub(super) fn cut_block<'a>(
    config: &DecoderConfig,
    param: &'a HfParam,
) -> Option<(&'a str, usize)> {
    let widths = merged(config, param);
    let checked = match widths.len() {
        len if is_expert(param) => len,
        len => len - 1,
    };
    let names = param.parts.iter().map(|part| part.name.as_str());
    // A tensor that has several of these is named for each.
    let last = param.parts.last()?.name.as_str();
    let named = names.chain(std::iter::repeat(last)).zip(widths);
    named
        .take(checked)
        .find(|(_, width)| !width.is_multiple_of(HfQuantization::BLOCK))
}

/// The numbers of rows that engines concatenate to the matrix that has a weight.
fn merged(config: &DecoderConfig, param: &HfParam) -> Vec<usize> {
    let width = param.shape[1];
    let is = |end: &str| param.path.ends_with(end);
    if is(".attention.qkv.weight") {
        let [query, key] = [config.heads, config.kv_heads].map(|heads| heads * config.head_dim);
        vec![query, key, key]
    } else if is(".attention.q_down.weight") {
        // The projection to the latents of keys and values follows.
        let latents = config.latent.as_ref().map(|mla| mla.kv_lora_rank);
        vec![width, latents.unwrap_or(0)]
    } else if is(".up.weight") && config.activation.is_gated() {
        vec![width / 2; 2]
    } else {
        param.parts.iter().map(|part| part.num_columns()).collect()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{families::Family, hf::HfPart};

    fn param(path: &str, shape: [usize; 2], parts: &[(&str, usize)]) -> HfParam {
        let mut end = 0;
        let part = |(name, len): &(&str, usize)| {
            end += len;
            HfPart {
                name: name.to_string(),
                columns: std::iter::once(end - len..end).collect(),
            }
        };
        HfParam {
            path: path.into(),
            shape: shape.to_vec(),
            parts: parts.iter().map(part).collect(),
            transposed: true,
            is_buffer: false,
        }
    }

    #[rstest]
    // Queries have 4 * 64 rows, keys and values 2 * 64.
    #[case::fits("attention.qkv", &[("q", 256), ("k", 128), ("v", 128)], 64, None)]
    #[case::query("attention.qkv", &[("q", 160), ("k", 80), ("v", 80)], 40, Some(("q", 160)))]
    #[case::key("attention.qkv", &[("q", 128), ("k", 64), ("v", 64)], 32, Some(("k", 64)))]
    #[case::fused("attention.qkv", &[("qkv", 256)], 32, Some(("qkv", 64)))]
    #[case::gate("mlp.up", &[("gate", 200), ("up", 200)], 64, Some(("gate", 200)))]
    #[case::fused_gate("mlp.up", &[("gate_up", 400)], 64, Some(("gate_up", 200)))]
    #[case::down("mlp.down", &[("down", 100)], 64, None)]
    #[case::expert("moe.experts.3.down", &[("down", 100)], 64, Some(("down", 100)))]
    #[case::latent("attention.q_down", &[("q_a", 96)], 64, Some(("q_a", 96)))]
    #[case::latent_of_keys("attention.kv_down", &[("kv_a", 96)], 64, None)]
    fn the_first_part_that_cuts_a_block_is_named(
        #[case] path: &str,
        #[case] parts: &[(&str, usize)],
        #[case] head_dim: usize,
        #[case] expected: Option<(&str, usize)>,
    ) {
        let config = DecoderConfig {
            heads: 4,
            kv_heads: 2,
            head_dim,
            ..Family::LLAMA.template()
        };
        let width = parts.iter().map(|(_, len)| len).sum();
        let param = param(&format!("blocks.1.{path}.weight"), [32, width], parts);
        assert_eq!(cut_block(&config, &param), expected);
    }
}
