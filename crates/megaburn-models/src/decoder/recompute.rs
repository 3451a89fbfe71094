/// What backward computes once more instead of keeping it (Megatron's `--recompute-granularity
/// selective`). Nothing at first. Gradients are the same to the bit.
///
/// Attention's scores need no switch (Megatron's `core_attn`): the fused kernels never hold them.
///
/// Source: Korthikanti et al., "Reducing activation recomputation in large transformer models"
/// (2022), <https://arxiv.org/abs/2205.05198>, section 5; Megatron-LM
/// `megatron/core/tensor_parallel/random.py`, `CheckpointWithoutOutput`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recompute {
    /// What the norms give (`layernorm` there): from the residual stream, which their own backward keeps.
    pub norm: bool,
    /// What the MLPs' activations give (`moe_act` there, of experts only): from what the up matrix gave.
    pub activation: bool,
}
