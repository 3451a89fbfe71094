mod config;
mod display;
mod parallelized;
mod precision;
mod quantized;
mod replicated;
mod rounding;
mod sequence_shards;
mod shards;
mod split;

use burn::{
    module::{Module, Param},
    tensor::{DType, Tensor},
};
use megaburn_autograd::MainGrad;
use megaburn_collective::{
    Group,
    region::{
        Partial, SequenceShard, copy_to, gather_from_last_dim, gather_from_sequence,
        scatter_to_last_dim,
    },
};
use megaburn_kernels::{
    AmaxReduction, Bias, GroupWeight, LinearOptions, LinearQuantization, MatrixRole, SummedDim,
    add_bias,
};
use megaburn_mesh::ShardSpec;

pub use config::ParallelLinearConfig;
pub use precision::{LinearPrecision, PrecisionScope};
pub use quantized::QuantizedLayer;
pub use replicated::{ReplicatedLinear, ReplicatedLinearConfig};
pub use rounding::CurrentTokens;
pub use split::Split;

pub(crate) use precision::AmaxReductions;
use quantized::product;
use rounding::HeldRows;
use sequence_shards::sequence_shards;

use crate::{
    adapters::{is_adapted, weight_value, weight_value_as},
    recomputable::Recomputable,
    replicated_parts::ReplicatedParts,
};

/// A linear layer `Y = X W + b` split over a group of ranks.
///
/// Column: `W = [W_1 .. W_n]`, and rank i computes `Y_i = f(X) W_i + b_i`. Row: `X = [X_1 .. X_n]`
/// and `W = [W_1; ..; W_n]`, and `Y = g(X_i W_i) + b`, where g sums over the ranks. f is
/// [`copy_to`] and g is [`reduce_from`](megaburn_collective::region::reduce_from); with sequence
/// parallelism they are an all-gather and a reduce-scatter along the sequence.
///
/// Source: Shoeybi et al., "Megatron-LM" (2019), section 3; Korthikanti et al. (2022) for sequence
/// parallelism; Megatron-LM `megatron/core/tensor_parallel/layers.py`.
///
/// # Collective
/// All members call `forward` together.
///
/// | split | forward | backward |
/// |---|---|---|
/// | column | none | all-reduce of dX |
/// | column, `sequence_parallel` | all-gather of X | all-gather of X for dW (not if W is frozen); reduce-scatter of dX |
/// | column, `gather_output` | also all-gather of Y | nothing more |
/// | row | all-reduce of Y | none (without `input_is_parallel`: all-gather of dX) |
/// | row, `sequence_parallel` | reduce-scatter of Y | all-gather of dY; all-reduce of db |
///
/// With sequence parallelism a column split saves only this rank's shard of X and gathers X a
/// second time for dW. Key/value parts that several ranks hold add an all-reduce of their gradients
/// over their holders. With a [precision](LinearPrecision) of one scale per tensor, each pass also
/// reduces the largest magnitude of every matrix of which several ranks hold parts; shards of X and dY
/// are then quantised first, and their all-gathers send a byte an element
/// ([`fp8_sequence_gather`](LinearPrecision::fp8_sequence_gather)).
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct ParallelLinear {
    /// This rank's shard of the weight, `[d_input, d_output / n]` or `[d_input / n, d_output]`.
    pub weight: Param<Tensor<2>>,
    /// The bias: `[d_output / n]` in a column split, `[d_output]` on every rank in a row split.
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
    main_grad: MainGrad,
    bias_grad: MainGrad,
    quantized: Option<QuantizedLayer>,
    /// The ranks that hold copies of a layer that is not split.
    copied_on: Option<Group>,
}

impl ParallelLinear {
    /// Applies the layer.
    ///
    /// # Shapes
    /// - input: `[.., d_input]`; row with `input_is_parallel`: `[.., d_input / n]`; column with
    ///   `sequence_parallel`: `[seq / n, .., d_input]`
    /// - output: `[.., d_output]`; column without `gather_output`: `[.., d_output / n]`; row with
    ///   `sequence_parallel`: `[seq / n, .., d_output]`
    pub fn forward<const D: usize>(&self, x: impl Into<Recomputable<D>>) -> Tensor<D> {
        let x = x.into();
        match self.plan.config.split {
            // Y_i = f(X) W_i + b_i
            Split::Column => self.column_output(x, self.bias()),
            // One rank has the whole sum, so its GEMM can add the bias.
            Split::Row if self.plan.group.size() == 1 => self.local_linear(x, self.bias()),
            // Y = g(X_i W_i) + b
            Split::Row => {
                let (y, bias) = self.forward_deferred_bias(x);
                match bias {
                    Some(bias) => add_bias(y, bias),
                    None => y,
                }
            }
        }
    }

    /// Applies the layer without its bias, which is returned for the caller to add fused with the
    /// next operation (Megatron's `skip_bias_add`).
    ///
    /// # Shapes
    /// As [`forward`](Self::forward); the bias has as many features as the output.
    /// # Collective
    /// As [`forward`](Self::forward); `gather_output` gathers the bias too.
    pub fn forward_with_bias<const D: usize>(
        &self,
        x: impl Into<Recomputable<D>>,
    ) -> (Tensor<D>, Option<Tensor<1>>) {
        let (y, bias) = self.forward_deferred_bias(x);
        let is_gathered = self.plan.config.split == Split::Column;
        let gathered = |bias: Bias| {
            if is_gathered {
                self.gathered(bias.value)
            } else {
                bias.value
            }
        };
        (y, bias.map(gathered))
    }

    /// Like [`forward_with_bias`](Self::forward_with_bias), but the bias comes with its main
    /// gradient and holds this rank's features only.
    pub(crate) fn forward_deferred_bias<const D: usize>(
        &self,
        x: impl Into<Recomputable<D>>,
    ) -> (Tensor<D>, Option<Bias>) {
        let x = x.into();
        let y = match self.plan.config.split {
            Split::Column => self.column_output(x, None),
            Split::Row => self.row_output(x),
        };
        let bias = self.bias().map(|value| Bias {
            value,
            main_grad: self.bias_grad(),
        });
        (y, bias)
    }

    /// Makes the layer one of a model. Without it, only ranks that split the layer share scales, and
    /// the weight is quantised in every pass.
    pub fn in_scope(self, scope: &PrecisionScope) -> Self {
        let LinearPlan { config, group, .. } = &self.plan;
        let reductions = AmaxReductions::of_split(config.split, group, &scope.tokens);
        self.reduced_by(reductions, scope)
    }

    /// Makes the layer that of one of several experts in a model: `of_tokens` reduces the largest
    /// magnitudes of all experts' tokens over the other ranks that have some.
    pub(crate) fn in_experts(
        self,
        scope: &PrecisionScope,
        of_tokens: Option<AmaxReduction>,
    ) -> Self {
        let LinearPlan { config, group, .. } = &self.plan;
        let reductions = AmaxReductions::of_features(config.split, group, of_tokens);
        self.reduced_by(reductions, scope)
    }

    fn reduced_by(mut self, reductions: AmaxReductions, scope: &PrecisionScope) -> Self {
        let LinearPlan { config, group, .. } = &self.plan;
        let random = config.random_numbers(group, &self.plan.weight_spec);
        let rows = HeldRows::of_chunks(scope.context, scope.current.clone());
        let shards = sequence_shards(config.split, config.sequence_parallel, group);
        let layer = |precision| {
            QuantizedLayer::new(precision, reductions, (random, rows)).with_shards(shards)
        };
        let quantized = config.precision.map(layer);
        self.plan.quantized = quantized.map(|layer| layer.kept_in(&scope.weights));
        self
    }

    /// Returns the layer with the same weights for full sequences, as generation needs it. It is
    /// not quantised.
    pub fn whole_sequence(mut self) -> Self {
        self.plan.config.sequence_parallel = false;
        self.plan.config.precision = None;
        self.plan.quantized = None;
        self
    }

    /// This rank's shard of the weight as an operand of a grouped GEMM, without any communication.
    pub(crate) fn group_weight(&self) -> GroupWeight {
        GroupWeight {
            weight: weight_value(&self.weight, &self.plan.group),
            main_grad: self.main_grad(),
        }
    }

    /// How the matrices of the layer's products are quantised now.
    pub(crate) fn quantization(&self) -> Option<LinearQuantization> {
        self.plan.quantized.as_ref()?.quantization()
    }

    /// Whether its products need the largest magnitudes of their matrices.
    pub(crate) fn needs_amaxes(&self) -> bool {
        self.quantization().is_some_and(|of| of.recipe.needs_amax())
    }

    /// Whether the layer needs the largest magnitude of its input as it is given: not if it gathers the
    /// input or quantises a transformed one as well.
    pub(crate) fn needs_input_amax(&self) -> bool {
        self.needs_amax_of(MatrixRole::Input) && !self.gathers(Split::Column)
    }

    /// As [`needs_input_amax`](Self::needs_input_amax), of the gradient of its result.
    pub(crate) fn needs_gradient_amax(&self) -> bool {
        self.needs_amax_of(MatrixRole::Gradient) && !self.gathers(Split::Row)
    }

    fn needs_amax_of(&self, role: MatrixRole) -> bool {
        let recipe = self.quantization().map(|of| of.recipe);
        recipe.is_some_and(|of| of.needs_amax() && !of.transforms(role, SummedDim::Rows))
    }

    /// Whether this is the split whose shards of the sequence, of inputs or of gradients, are gathered.
    fn gathers(&self, split: Split) -> bool {
        let LinearPlan { config, group, .. } = &self.plan;
        config.split == split && config.sequence_parallel && group.size() > 1
    }

    /// `f(x) W + bias` with this rank's columns, or with those of all ranks.
    fn column_output<const D: usize>(
        &self,
        x: Recomputable<D>,
        bias: Option<Tensor<1>>,
    ) -> Tensor<D> {
        let LinearPlan { config, group, .. } = &self.plan;
        let x = if self.gathers_quantized() {
            x
        } else {
            column_input(x, group, config.sequence_parallel)
        };
        self.gathered(self.local_linear(x, bias))
    }

    /// Whether the product itself gathers and scatters shards of the sequence.
    fn gathers_quantized(&self) -> bool {
        let layer = self.plan.quantized.as_ref();
        layer.is_some_and(QuantizedLayer::gathers)
    }

    fn gathered<const D: usize>(&self, y: Tensor<D>) -> Tensor<D> {
        if self.plan.config.gather_output {
            gather_from_last_dim(y, &self.plan.group)
        } else {
            y
        }
    }

    /// `g(x W)`.
    fn row_output<const D: usize>(&self, x: Recomputable<D>) -> Tensor<D> {
        let LinearPlan { config, group, .. } = &self.plan;
        let x = match self.gathers(Split::Row) {
            // The gradient of the product has the rows of all ranks.
            true => x.with_gradient_amax(None),
            false => x,
        };
        let x = if config.input_is_parallel {
            x
        } else {
            scatter_to_last_dim(x.into_tensor(), group).into()
        };
        let y = self.local_linear(x, None);
        if self.gathers_quantized() {
            return y;
        }
        let partial = Partial::new(y, group);
        if config.sequence_parallel {
            partial.reduce_scatter().into_shard()
        } else {
            partial.all_reduce()
        }
    }

    /// `x W + bias` with this rank's shard of the weight.
    fn local_linear<const D: usize>(
        &self,
        x: Recomputable<D>,
        bias: Option<Tensor<1>>,
    ) -> Tensor<D> {
        let found = x.found();
        let (x, again) = x.into_parts();
        let main_grad = self.main_grad();
        let bias_grad = self.bias_grad();
        let options = LinearOptions {
            main_grad,
            bias_grad,
            again,
            found,
            ..Default::default()
        };
        let quantized = self.plan.quantized.as_ref();
        let weight = self.weight(x.dtype());
        product(x, weight, bias, options, quantized)
    }

    /// The weight's main gradient; `None` if the gradient is summed over replicas first, or is that
    /// of low-rank factors.
    fn main_grad(&self) -> Option<MainGrad> {
        let is_own = self.plan.replicas.is_empty() && !is_adapted(&self.weight);
        is_own.then(|| self.plan.main_grad.clone())
    }

    /// The bias's main gradient; `None` if the gradient is summed over ranks first.
    fn bias_grad(&self) -> Option<MainGrad> {
        let LinearPlan {
            config,
            group,
            bias_grad,
            ..
        } = &self.plan;
        let is_summed = match config.split {
            Split::Row => config.sequence_parallel && group.size() > 1,
            Split::Column => !self.plan.replicas.is_empty(),
        };
        (!is_summed).then(|| bias_grad.clone())
    }

    fn weight(&self, dtype: DType) -> Tensor<2> {
        let dim = self.plan.weight_spec.dim;
        let replicas = self.plan.replicas.iter();
        let weight = weight_value_as(&self.weight, self.holders(), dtype);
        replicas.fold(weight, |w, part| part.with_summed_grad(w, dim))
    }

    /// The bias as this rank adds it. A row split's bias is replicated; added to sequence shards,
    /// each rank sees the gradient of its own tokens only, so backward sums it over the group.
    fn bias(&self) -> Option<Tensor<1>> {
        let LinearPlan {
            config,
            group,
            replicas,
            ..
        } = &self.plan;
        let bias = self.bias.as_ref()?.val();
        Some(match config.split {
            Split::Row if config.sequence_parallel => copy_to(bias, group),
            Split::Row => bias,
            Split::Column => replicas
                .iter()
                .fold(bias, |bias, part| part.with_summed_grad(bias, 0)),
        })
    }
}

/// The input that every member's columns multiply. Of a sequence-parallel input, only this rank's
/// shard is saved for backward.
pub(crate) fn column_input<const D: usize>(
    x: Recomputable<D>,
    group: &Group,
    sequence_parallel: bool,
) -> Recomputable<D> {
    if group.size() == 1 {
        return x;
    }
    if !sequence_parallel {
        return x.map(|x| copy_to(x, group));
    }
    let regather_group = group.clone();
    x.map_recomputed(
        |x| SequenceShard::new(x, group).gather(),
        move |rows| gather_from_sequence(rows, &regather_group),
    )
}
