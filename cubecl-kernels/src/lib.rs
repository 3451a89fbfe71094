//! The operations of a transformer, one folder each. A folder has the function on
//! [`Tensor`](burn::Tensor)s, a plain-tensor [`mod@reference`] that defines it on every Burn
//! backend, and an operation with a handwritten backward where Burn's autodiff would waste passes
//! over memory.
//!
//! Activations are `[seq, batch, hidden]`. Statistics, softmax and rotations are computed in f32
//! (f64 for f64 inputs) whatever the dtype of the activations, and results have the dtype of the
//! input.
//!
//! Unsupported dtypes, tensors on two devices, shapes that do not fit and options out of range are
//! programming errors: the operation panics before it launches anything. The message names the
//! operation, the value and what to change. Views (transposed, sliced, expanded) give the same
//! results as their copies. Unless documented otherwise, a tensor without tokens gives an empty
//! result and gradients of 0.
//!
//! Letters in the docs: `s` positions (`s_q` of queries, `s_k` of keys), `b` batch, `h` heads (`hq`
//! of queries, `hkv` of keys and values), `d` size of a head, `f` features of a feed-forward.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use megaburn_kernels::{AttentionOptions, RopeConfig, apply_rope, attention, rms_norm};
//!
//! let device = Device::flex();
//! let x = Tensor::<3>::random([6, 2, 4 * 8], Distribution::Default, &device);
//! let x = rms_norm(x, Tensor::ones([32], &device), 1e-5);
//! let heads = x.reshape([6, 2, 4, 8]);
//! let table = RopeConfig::new(8).init(0..6, &device)?;
//! let (q, k) = (apply_rope(heads.clone(), &table), apply_rope(heads.clone(), &table));
//! let y = attention(q, k, heads, AttentionOptions::causal());
//! assert_eq!(y.dims(), [6, 2, 32]);
//! # Ok::<(), megaburn_kernels::KernelError>(())
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]
// Burn has deprecated NdArray, and still has it.
#![cfg_attr(feature = "ndarray", allow(deprecated))]

#[cfg(not(feature = "flex"))]
compile_error!("megaburn-kernels has no backend: enable its feature `flex`");

mod activation;
mod attention;
mod bias;
mod cross_entropy;
mod dropout;
mod element_sums;
mod embedding;
mod error;
mod gemm_ops;
mod gpu;
mod gradient_accumulation_fusion;
mod hash;
#[cfg(feature = "cuda")]
mod kernel_parts;
mod linear;
mod moe;
mod norms;
mod optimizer;
mod quantized;
mod repeat;
mod rope;
mod softmax;
mod split;
mod sum;

pub use activation::clamped_swiglu::{clamped_swiglu, clamped_swiglu_weighted};
pub use activation::geglu::{geglu, geglu_tanh, geglu_tanh_weighted, geglu_weighted};
pub use activation::gelu::{bias_gelu, bias_gelu_tanh, gelu, gelu_tanh};
pub use activation::squared_relu::{squared_relu, squared_relu_weighted};
pub use activation::swiglu::{swiglu, swiglu_observed, swiglu_weighted};
pub use attention::{
    AUTO_LEN, AttentionDropout, AttentionKernel, AttentionOptions, AttentionTiles,
    OnlineSoftmaxMerge, PackedSequences, PartialAttention, add_rows, attention, biased_attention,
    biased_partial_attention, biased_partial_attention_gradients, largest_scores,
    partial_attention, partial_attention_gradients, sink_gradients,
};
pub use bias::{Bias, add_bias, add_positions};
pub use cross_entropy::{CrossEntropyOptions, cross_entropy, linear_cross_entropy};
pub use dropout::{DropoutKey, bias_dropout_add, dropout};
pub use element_sums::{ElementSums, PendingSums};
pub use embedding::{EmbeddingOptions, embedding};
pub use error::KernelError;
pub use gemm_ops::GemmAlgorithm;
pub use gpu::{flush, is_on_gpu};
pub use hash::{PendingHash, Runs};
pub use linear::{
    GroupWeight, GroupedGemmChoice, GroupedOptions, LinearOptions, grouped_linear, linear,
};
pub use moe::{
    BalanceLoss, ExpertPermutation, Routed, RouterGradients, RouterGroups, RouterLossTerms,
    RouterLosses, RouterOptions, RouterScores, choose_experts, ep_ranks_of_experts, expert_weights,
    permutation_by_expert, permute, read_overlapped, route, route_to, router_logits, router_losses,
    router_scores, unpermute,
};
pub use norms::layer_norm::{layer_norm, layer_norm_add, layer_norm_recompute, layer_norm_with};
pub use norms::rms_norm::{rms_norm, rms_norm_add, rms_norm_with};
pub use norms::{NormAmaxes, NormGrads, NormOptions};
pub use optimizer::{
    AdamwState, AdamwStep, FP8_MOMENT_BLOCK, Fp8Moment, LionState, LionStep, SgdState, SgdStep,
    adamw, adamw_all, adamw_all_observed, adamw_scaled, bf16_out_slice, joined_master, lion,
    lion_scaled, master_remainder, packed_moment, partial_sums_of_squares, scaled, sgd, sgd_scaled,
    total, unpacked_moment,
};
pub use quantized::{
    AmaxReduction, AmaxSource, DelayedAmax, FoundAmax, FoundAmaxes, KeptWeight, LinearQuantization,
    MatrixCounts, MatrixRole, Nvfp4, QuantizationCounts, QuantizationRecipe, RandomNumbers, Scale,
    Scaling, SentAmax, SentScale, SequenceShards, ShardCollectives, SmallFloat, SummedDim,
    UnchangedWeights, WeightSpan, can_quantize, is_emulated, largest_magnitude, quantized_linear,
    quantized_numbers,
};
pub use repeat::repeat_heads;
pub use rope::{
    LongRopeScaling, RopeConfig, RopeLayout, RopeScaling, RopeTable, YarnScaling, apply_rope,
    packed_positions,
};
pub use softmax::{SoftmaxMask, scale_mask_softmax};
pub use split::{SliceMode, split_heads, split_heads_observed, split_last, split_last_with};
pub use sum::{sum_all, sum_columns};

/// FP8 numbers on NVIDIA GPUs: the largest magnitude of a tensor, and the cast of a matrix with one
/// scale or those of blocks, together with its transpose.
#[cfg(feature = "cuda")]
pub mod fp8 {
    pub use crate::quantized::launch::{
        BlockCast, BlockCastOptions, Cast, CastOptions, amax, block_cast, cast,
    };
}

/// The definitions: every operation composed of differentiable tensor operations, simple and slow.
///
/// Each fast operation is tested against its reference, in values and in gradients.
pub mod reference {
    pub use crate::activation::reference::clamped_swiglu::{
        clamped_swiglu, clamped_swiglu_weighted,
    };
    pub use crate::activation::reference::geglu::{
        geglu, geglu_tanh, geglu_tanh_weighted, geglu_weighted,
    };
    pub use crate::activation::reference::gelu::{bias_gelu, bias_gelu_tanh, gelu, gelu_tanh};
    pub use crate::activation::reference::squared_relu::{squared_relu, squared_relu_weighted};
    pub use crate::activation::reference::swiglu::{swiglu, swiglu_weighted};
    pub use crate::attention::reference::{attention, biased_attention};
    pub use crate::bias::reference::{add_bias, add_positions};
    pub use crate::cross_entropy::reference::cross_entropy;
    pub use crate::dropout::reference::{bias_dropout_add, dropout};
    pub use crate::embedding::reference::embedding;
    pub use crate::linear::reference::linear;
    pub use crate::moe::router::reference::route;
    pub use crate::norms::reference::layer_norm::{layer_norm, layer_norm_add, layer_norm_with};
    pub use crate::norms::reference::rms_norm::{rms_norm, rms_norm_add, rms_norm_with};
    pub use crate::optimizer::reference::{adamw, lion, sgd};
    pub use crate::repeat::reference::repeat_heads;
    pub use crate::rope::reference::apply_rope;
    pub use crate::softmax::reference::scale_mask_softmax;
    pub use crate::sum::reference::{sum_all, sum_columns};
}
