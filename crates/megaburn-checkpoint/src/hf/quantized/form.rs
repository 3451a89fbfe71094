//! The forms in which weights are published in FP8.

use burn::tensor::DType;
use serde_json::{Value, json};

use super::scaling::Scaling;

/// How the weights of linear layers are published in FP8 (E4M3), for serving engines that quantise
/// activations themselves, such as vLLM and SGLang.
///
/// An element is the number of its code times its scale. The scale is the largest magnitude of the
/// elements that share it over 448, and codes are rounded to nearest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HfQuantization {
    /// One scale for each block of 128 by 128 elements, in f32; activations have one for 128
    /// neighbours. This is the form of DeepSeek-V3 and Qwen3-FP8 (`quant_method` `fp8`).
    Block {
        /// Whether scales are rounded up to powers of two, as the recipe `blockwise` does in training.
        powers_of_two: bool,
    },
    /// One scale for each output feature, in the type of the model; activations have one for each
    /// token. This is `compressed-tensors`, as the scheme `FP8_DYNAMIC` of llm-compressor writes it.
    Channel,
    /// One scale for each weight; activations have one for each token. This is `compressed-tensors`
    /// too.
    Tensor,
}

/// Rows and columns of a block.
const BLOCK: [usize; 2] = [HfQuantization::BLOCK; 2];

impl HfQuantization {
    /// The number of rows, and of columns, that share a scale in [`Block`](Self::Block).
    pub const BLOCK: usize = 128;

    pub(super) fn scaling(self) -> Scaling {
        match self {
            Self::Block { .. } => Scaling::Block(BLOCK),
            Self::Channel => Scaling::Channel,
            Self::Tensor => Scaling::Tensor,
        }
    }

    pub(super) fn has_powers_of_two(self) -> bool {
        matches!(
            self,
            Self::Block {
                powers_of_two: true
            }
        )
    }

    /// The type of the scales of a model of type `dtype`.
    pub(in crate::hf) fn scale_dtype(self, dtype: DType) -> DType {
        match self {
            Self::Block { .. } => DType::F32,
            Self::Channel | Self::Tensor => dtype,
        }
    }

    /// The name of the scales of a weight.
    pub(in crate::hf) fn scales_name(self, weight: &str) -> String {
        match self {
            Self::Block { .. } => format!("{weight}_scale_inv"),
            Self::Channel | Self::Tensor => format!("{weight}_scale"),
        }
    }

    /// The shape of the scales of a weight.
    pub(in crate::hf) fn scales_shape(self, weight: &[usize]) -> Vec<usize> {
        match self {
            Self::Tensor => vec![1],
            Self::Block { .. } | Self::Channel => self.scaling().grid(weight).scales().to_vec(),
        }
    }

    /// The entry `quantization_config` of `config.json`, for a model whose linear layers `kept` are
    /// not quantised.
    pub fn config(self, kept: &[String]) -> Value {
        let strategy = match self {
            Self::Block { .. } => {
                return json!({
                    "quant_method": "fp8",
                    "fmt": "e4m3",
                    "activation_scheme": "dynamic",
                    "weight_block_size": BLOCK,
                    "modules_to_not_convert": kept,
                });
            }
            Self::Channel => "channel",
            Self::Tensor => "tensor",
        };
        json!({
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": strategy,
                        "symmetric": true,
                        "dynamic": false,
                    },
                    "input_activations": {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": "token",
                        "symmetric": true,
                        "dynamic": true,
                    },
                },
            },
            "ignore": kept,
        })
    }
}
