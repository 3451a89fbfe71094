use burn::{
    module::{Module, Param},
    nn::Initializer,
    prelude::Device,
    tensor::{Tensor, activation::sigmoid},
};
use megaburn_collective::Group;
use megaburn_kernels::{LinearOptions, linear};
use megaburn_mesh::{Axis, ShardSpec};

use crate::{
    error::ParallelError,
    init::InitDraw,
    replica::Replica,
    shards::{PlanBuilder, Sharded},
};

/// The gate of the shared expert: a token's output of that expert is multiplied by the sigmoid of
/// one logit of the token. The gate is replicated, and each rank computes it for its own tokens.
///
/// Source: Qwen2-MoE (Yang et al., "Qwen2 technical report", 2024); Megatron-LM's
/// `--moe-shared-expert-gate` in `megatron/core/transformer/moe/shared_experts.py`.
///
/// # Collective
/// Backward: with sequence parallelism one all-reduce of the weight's gradient, because each rank
/// sees its own tokens only.
#[derive(Module, Debug)]
pub struct SharedGate {
    /// The weight, `[d_model, 1]`.
    pub weight: Param<Tensor<2>>,
    #[module(skip)]
    replica: Replica,
    #[module(skip)]
    name: Option<String>,
}

impl SharedGate {
    pub(super) fn new(
        d_model: usize,
        sequence_parallel: bool,
        initializer: &Initializer,
        name: Option<String>,
        tp: &Group,
        device: &Device,
    ) -> Result<Self, ParallelError> {
        let shape = [d_model, 1];
        let draw = InitDraw {
            layer: "SharedGate",
            name: name.as_deref(),
            field: "weight",
            initializer,
            fans: shape,
        };
        let spec = ShardSpec::whole(&shape, Axis::Tp, tp.rank(), tp.size());
        Ok(Self {
            weight: draw.param(&spec, tp, device)?,
            replica: Replica::of(tp, sequence_parallel),
            name,
        })
    }

    /// The factor of each token.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]` to `[seq, batch, 1]`
    pub(super) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let weight = self.replica.value(&self.weight);
        sigmoid(linear(x, weight, None, LinearOptions::default()))
    }

    pub(super) fn whole_sequence(mut self) -> Self {
        self.replica = self.replica.with_all_rows();
        self
    }
}

impl Sharded for SharedGate {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.drawn_from(self.name.as_deref());
        plan.param("weight", &self.replica.spec(&self.weight));
    }
}
