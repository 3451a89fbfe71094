use std::fmt;

use burn::{
    config::Config,
    module::{Module, Param},
    nn::Initializer,
    prelude::Device,
    tensor::{Tensor, module::linear},
};
use megaburn_collective::{
    Group,
    region::{Partial, SequenceShard, copy_to, gather_from_last_dim, scatter_to_last_dim},
};
use megaburn_mesh::{Axis, Part, ShardSpec};

use crate::{ParallelError, PlanBuilder, Sharded, init::Draw};

/// Which dimension of a linear layer's weight `[d_input, d_output]` is split over the group.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Split {
    /// The output features: `Y_i = X W_i`.
    Column,
    /// The input features: `Y = sum_i X_i W_i`.
    Row,
}

/// Configuration of a [`ParallelLinear`].
///
/// [`new`](Self::new) is a drop-in for Burn's `LinearConfig`: whole tensors in, whole tensors out.
/// [`column`](Self::column) followed by [`row`](Self::row) is Megatron's pair: between the two the
/// features stay split and one all-reduce a direction suffices.
#[derive(Config, Debug)]
pub struct ParallelLinearConfig {
    /// Input features of the whole layer.
    pub d_input: usize,
    /// Output features of the whole layer.
    pub d_output: usize,
    /// Which dimension is split.
    #[config(default = "Split::Column")]
    pub split: Split,
    /// Whether there is a bias.
    #[config(default = true)]
    pub bias: bool,
    /// Column: whether every rank gets all output features.
    #[config(default = true)]
    pub gather_output: bool,
    /// Row: whether the input already holds only this rank's features.
    #[config(default = false)]
    pub input_is_parallel: bool,
    /// Whether [`ParallelLinear::forward_with_bias`] will be used, so that the caller can fuse the
    /// bias with what follows.
    #[config(default = false)]
    pub skip_bias_add: bool,
    /// Whether the layer stands at the edge of a sequence-parallel region: a column layer's input,
    /// a row layer's output, then holds this rank's stretch of the sequence (dim 0).
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// The split dimension as separately split parts (a fused QKV or gate-up); `None`: one part.
    pub fused: Option<Vec<Part>>,
    /// How weight and bias start, as in Burn's `Linear`.
    #[config(
        default = "Initializer::KaimingUniform { gain: 1.0 / f64::sqrt(3.0), fan_out_only: false }"
    )]
    pub initializer: Initializer,
    /// The layer's path in the model, from which its weights are drawn. Required in a group of
    /// more than one.
    pub path: Option<String>,
}

impl ParallelLinearConfig {
    /// Whole input, this rank's share of the output features.
    pub fn column(d_input: usize, d_output: usize) -> Self {
        Self::new(d_input, d_output).with_gather_output(false)
    }

    /// This rank's share of the input features, whole output.
    pub fn row(d_input: usize, d_output: usize) -> Self {
        Self::new(d_input, d_output).with_split(Split::Row).with_input_is_parallel(true)
    }

    /// Makes the split dimension a concatenation of parts.
    pub fn with_parts(mut self, parts: impl Into<Vec<Part>>) -> Self {
        self.fused = Some(parts.into());
        self
    }

    /// This rank's shard of the layer.
    ///
    /// # Errors
    /// No name in a group of more than one, features that do not divide, or flags that
    /// contradict each other.
    /// # Collective
    /// Nothing is sent; every member of `group` makes its own shard.
    pub fn init(&self, group: &Group, device: &Device) -> Result<ParallelLinear, ParallelError> {
        self.validate()?;
        let [rows, columns] = [self.d_input, self.d_output];
        let (dim, size) = match self.split {
            Split::Column => (1, columns),
            Split::Row => (0, rows),
        };
        let parts = self.fused.clone().unwrap_or_else(|| vec![Part::new(size)]);
        let (rank, ranks) = (group.rank(), group.size());
        let shard = |shape: &[usize], dim| {
            ShardSpec::split(shape, dim, &parts, Axis::Tp, rank, ranks)
                .map_err(|source| ParallelError::Shard { name: self.label(), source })
        };
        let weight_spec = shard(&[rows, columns], dim)?;
        let bias_spec = match (self.bias, self.split) {
            (false, _) => None,
            (true, Split::Column) => Some(shard(&[columns], 0)?),
            (true, Split::Row) => Some(ShardSpec::whole(&[columns], Axis::Tp, rank, ranks)),
        };
        let draw = |field| Draw {
            layer: "ParallelLinear",
            name: self.path.as_deref(),
            field,
            initializer: &self.initializer,
            fans: [rows, columns],
        };
        let weight = draw("weight").param(&weight_spec, group, device)?;
        let bias = bias_spec.as_ref().map(|spec| draw("bias").param(spec, group, device));
        let replicas = ReplicatedParts::of(&weight_spec, group)?;
        Ok(ParallelLinear {
            weight,
            bias: bias.transpose()?,
            plan: LinearPlan {
                config: self.clone(),
                group: group.clone(),
                weight_spec,
                bias_spec,
                replicas,
            },
        })
    }

    fn label(&self) -> String {
        self.path.clone().unwrap_or_else(|| "unnamed".into())
    }

    fn validate(&self) -> Result<(), ParallelError> {
        let refuse = |why: &str| {
            let (layer, name, why) = ("ParallelLinear", self.label(), why.to_string());
            Err(ParallelError::Config { layer, name, why })
        };
        match self.split {
            Split::Row if self.sequence_parallel && !self.input_is_parallel => refuse(
                "a row split with sequence parallelism needs `input_is_parallel`: the sequence and \
                 the features of its input cannot both be split",
            ),
            Split::Column if self.input_is_parallel => refuse(
                "`input_is_parallel` belongs to a row split; a column split takes all features",
            ),
            _ if self.skip_bias_add && !self.bias => {
                refuse("`skip_bias_add` without a bias: there is nothing to return")
            }
            Split::Column if self.skip_bias_add && self.gather_output => {
                refuse("`skip_bias_add` with `gather_output`: the returned bias would be one shard")
            }
            _ => Ok(()),
        }
    }
}

/// A linear layer `Y = X W + b` split over a group of ranks.
///
/// Source: Shoeybi et al., "Megatron-LM" (2019), section 3; Korthikanti et al. (2022) for sequence
/// parallelism; Megatron-LM `megatron/core/tensor_parallel/layers.py`.
///
/// # Collective
/// All members call `forward` together.
///
/// | split | forward | backward |
/// |---|---|---|
/// | column | none (`sequence_parallel`: all-gather of X; `gather_output`: all-gather of Y) | all-reduce of dX (reduce-scatter) |
/// | row | all-reduce of Y (`sequence_parallel`: reduce-scatter) | none (all-gather of dY) |
#[derive(Module, Debug)]
pub struct ParallelLinear {
    /// This rank's shard of the weight, `[d_input, d_output / n]` or `[d_input / n, d_output]`.
    pub weight: Param<Tensor<2>>,
    /// The bias: `[d_output / n]` of a column split, `[d_output]` on every rank of a row split.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    plan: LinearPlan,
}

#[derive(Clone, Debug)]
struct LinearPlan {
    config: ParallelLinearConfig,
    group: Group,
    weight_spec: ShardSpec,
    bias_spec: Option<ShardSpec>,
    replicas: Vec<ReplicatedParts>,
}

impl ParallelLinear {
    /// Applies the layer.
    ///
    /// # Shapes
    /// - input: `[.., d_input]`; row with `input_is_parallel`: `[.., d_input / n]`; column with
    ///   `sequence_parallel`: `[seq / n, .., d_input]`
    /// - output: `[.., d_output]`; column without `gather_output`: `[.., d_output / n]`; row with
    ///   `sequence_parallel`: `[seq / n, .., d_output]`
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self.plan.config.split {
            Split::Column => {
                self.gathered(linear(self.column_input(x), self.weight(), self.bias()))
            }
            Split::Row => {
                let y = self.reduced(x);
                match self.bias() {
                    Some(bias) => y + bias.unsqueeze(),
                    None => y,
                }
            }
        }
    }

    /// Applies the layer without its bias, which is returned for the caller to add.
    ///
    /// # Shapes
    /// As [`forward`](Self::forward); the bias is `[d_output / n]` (column) or `[d_output]` (row).
    pub fn forward_with_bias<const D: usize>(
        &self,
        x: Tensor<D>,
    ) -> (Tensor<D>, Option<Tensor<1>>) {
        let y = match self.plan.config.split {
            Split::Column => self.gathered(linear(self.column_input(x), self.weight(), None)),
            Split::Row => self.reduced(x),
        };
        (y, self.bias())
    }

    fn column_input<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        if self.plan.config.sequence_parallel {
            SequenceShard::new(x, &self.plan.group).gather()
        } else {
            copy_to(x, &self.plan.group)
        }
    }

    fn gathered<const D: usize>(&self, y: Tensor<D>) -> Tensor<D> {
        if self.plan.config.gather_output { gather_from_last_dim(y, &self.plan.group) } else { y }
    }

    fn reduced<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let LinearPlan { config, group, .. } = &self.plan;
        let x = if config.input_is_parallel { x } else { scatter_to_last_dim(x, group) };
        let partial = Partial::new(linear(x, self.weight(), None), group);
        if config.sequence_parallel {
            partial.reduce_scatter().into_shard()
        } else {
            partial.all_reduce()
        }
    }

    fn weight(&self) -> Tensor<2> {
        let dim = self.plan.weight_spec.dim;
        self.plan.replicas.iter().fold(self.weight.val(), |weight, part| part.share(weight, dim))
    }

    /// The bias as this rank adds it. A row split's bias is a replica; added to sequence shards,
    /// each rank sees the gradient of its own tokens only.
    fn bias(&self) -> Option<Tensor<1>> {
        let LinearPlan { config, group, replicas, .. } = &self.plan;
        let bias = self.bias.as_ref()?.val();
        Some(match config.split {
            Split::Row if config.sequence_parallel => copy_to(bias, group),
            Split::Row => bias,
            Split::Column => replicas.iter().fold(bias, |bias, part| part.share(bias, 0)),
        })
    }
}

impl Sharded for ParallelLinear {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.param("weight", &self.plan.weight_spec);
        if let Some(spec) = &self.plan.bias_spec {
            plan.param("bias", spec);
        }
    }
}

/// A stretch of the split dimension that some neighbours hold too (the key/value heads, when there
/// are fewer than ranks). Each sees the gradient through its own query heads only.
#[derive(Clone)]
struct ReplicatedParts {
    start: usize,
    len: usize,
    holders: Group,
}

impl ReplicatedParts {
    fn of(spec: &ShardSpec, group: &Group) -> Result<Vec<Self>, ParallelError> {
        let replicated = spec.pieces.iter().filter(|piece| piece.replicas > 1);
        let part = |piece: &megaburn_mesh::Piece| {
            let first = group.rank() - piece.replica;
            let holders = &group.members()[first..first + piece.replicas];
            let holders = group.subgroup(&format!("{}-replicas", group.name()), holders)?;
            Ok(Self { start: piece.local.start, len: piece.local.len(), holders })
        };
        replicated.map(part).collect()
    }

    /// The same values; backward sums the stretch's gradient over its holders.
    fn share<const D: usize>(&self, param: Tensor<D>, dim: usize) -> Tensor<D> {
        let Self { start, len, holders } = self;
        let total = param.dims()[dim];
        let end = start + len;
        let mut parts = Vec::with_capacity(3);
        if *start > 0 {
            parts.push(param.clone().narrow(dim, 0, *start));
        }
        parts.push(copy_to(param.clone().narrow(dim, *start, *len), holders));
        if end < total {
            parts.push(param.narrow(dim, end, total - end));
        }
        Tensor::cat(parts, dim)
    }
}

impl fmt::Debug for ReplicatedParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{} of {:?}", self.start, self.start + self.len, self.holders)
    }
}
