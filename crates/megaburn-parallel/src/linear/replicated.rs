use burn::{
    config::Config,
    module::{Content, DisplaySettings, Module, ModuleDisplay, Param},
    nn::Initializer,
    prelude::Device,
    tensor::Tensor,
};
use megaburn_autograd::MainGrad;
use megaburn_collective::Group;
use megaburn_kernels::{GemmAlgorithm, LinearOptions, RandomNumbers};
use megaburn_mesh::{Axis, ShardSpec, Zigzag};

use super::{
    precision::{AmaxReductions, LinearPrecision, PrecisionScope},
    quantized::{QuantizedLayer, product},
    rounding::{CurrentTokens, HeldRows},
};
use crate::{
    adapters::{is_adapted, weight_value_as},
    display::one_line,
    error::ParallelError,
    init::{InitDraw, named},
    recomputable::Recomputable,
    replica::Replica,
    shards::{PlanBuilder, Sharded},
};

/// Configuration of a [`ReplicatedLinear`].
#[derive(Config, Debug)]
pub struct ReplicatedLinearConfig {
    /// Input features.
    pub d_input: usize,
    /// Output features.
    pub d_output: usize,
    /// Whether input and output are sharded along the sequence.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// Whether the layer has a bias, which starts at zero.
    #[config(default = false)]
    pub bias: bool,
    /// How the matrices of the products are quantised; `None` multiplies them as they are.
    pub precision: Option<LinearPrecision>,
    /// Initializer of the weight, as in Burn's `Linear`.
    #[config(
        default = "Initializer::KaimingUniform { gain: 1.0 / f64::sqrt(3.0), fan_out_only: false }"
    )]
    pub initializer: Initializer,
    /// The layer's path in the model, which keys the draw of its weight. Required in a group of
    /// more than one.
    pub path: Option<String>,
}

named!(ReplicatedLinearConfig);

impl ReplicatedLinearConfig {
    /// Builds the layer, identical on every rank.
    ///
    /// # Errors
    /// The layer has no name and the group more than one rank.
    /// # Collective
    /// Nothing is sent.
    pub fn init(&self, group: &Group, device: &Device) -> Result<ReplicatedLinear, ParallelError> {
        let shape = [self.d_input, self.d_output];
        let draw = InitDraw {
            layer: "ReplicatedLinear",
            name: self.path.as_deref(),
            field: "weight",
            initializer: &self.initializer,
            fans: shape,
        };
        let spec = ShardSpec::whole(&shape, Axis::Tp, group.rank(), group.size());
        let bias = || Initializer::Zeros.init([self.d_output], device);
        let tokens = self.sequence_parallel.then_some(group);
        let quantized = self.precision.map(|precision| {
            let rows = HeldRows::of_chunks(Zigzag::WHOLE, CurrentTokens::default());
            let random = random_numbers(group, self.path.as_deref());
            let reductions = AmaxReductions::of_tokens(tokens);
            QuantizedLayer::new(precision, reductions, (random, rows.of_shard(tokens)))
        });
        Ok(ReplicatedLinear {
            weight: draw.param(&spec, group, device)?,
            bias: self.bias.then(bias),
            plan: ReplicatedPlan {
                replica: Replica::of(group, self.sequence_parallel),
                path: self.path.clone(),
                main_grad: MainGrad::default(),
                bias_grad: MainGrad::default(),
                precision: self.precision,
                sequence_parallel: self.sequence_parallel,
                group: group.clone(),
                quantized,
            },
        })
    }
}

/// A linear layer `Y = X W + b` that is replicated on every rank of a group (Megatron's `duplicated`),
/// for small outputs that all ranks need in full.
///
/// Without sequence parallelism every rank computes the same output from the same input, and the
/// gradient of the output must be the same on all ranks too. If ranks use the output differently,
/// sum its gradient first, as [`ParallelLinear`](crate::ParallelLinear)'s column split does.
///
/// # Collective
/// Forward: none. Backward: with sequence parallelism one all-reduce of the gradients of weight and
/// bias, because each rank sees its own tokens only.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct ReplicatedLinear {
    /// The weight, `[d_input, d_output]`.
    pub weight: Param<Tensor<2>>,
    /// The bias, `[d_output]`, if the layer has one.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    plan: ReplicatedPlan,
}

#[derive(Clone, Debug)]
struct ReplicatedPlan {
    replica: Replica,
    path: Option<String>,
    main_grad: MainGrad,
    bias_grad: MainGrad,
    precision: Option<LinearPrecision>,
    sequence_parallel: bool,
    group: Group,
    quantized: Option<QuantizedLayer>,
}

impl ReplicatedLinear {
    /// Applies the layer.
    ///
    /// # Shapes
    /// `[.., d_input]` to `[.., d_output]`
    pub fn forward<const D: usize>(&self, x: impl Into<Recomputable<D>>) -> Tensor<D> {
        let (x, again) = x.into().into_parts();
        let options = LinearOptions {
            main_grad: self.main_grad(),
            bias_grad: self.bias_grad(),
            again,
            algorithm: self.algorithm(),
            ..Default::default()
        };
        let replica = &self.plan.replica;
        let bias = self.bias.as_ref().map(|bias| replica.value(bias));
        let quantized = self.plan.quantized.as_ref();
        let weight = weight_value_as(&self.weight, &self.plan.group, x.dtype());
        let weight = replica.shared(weight);
        product(x, weight, bias, options, quantized)
    }

    /// As [`ParallelLinear::in_scope`](crate::ParallelLinear::in_scope).
    pub fn in_scope(mut self, scope: &PrecisionScope) -> Self {
        let ReplicatedPlan {
            precision,
            sequence_parallel,
            group,
            path,
            ..
        } = &self.plan;
        let tokens = &scope.tokens;
        let is_split = *sequence_parallel || tokens.size() > group.size();
        let reductions = AmaxReductions::of_tokens(is_split.then_some(tokens));
        let random = random_numbers(group, path.as_deref());
        let rows = HeldRows::of_chunks(scope.context, scope.current.clone());
        let rows = rows.of_shard(sequence_parallel.then_some(group));
        let layer = |precision| QuantizedLayer::new(precision, reductions, (random, rows));
        let quantized = precision.map(layer);
        self.plan.quantized = quantized.map(|layer| layer.kept_in(&scope.weights));
        self
    }

    /// Returns the layer with the same parameters for full sequences, as generation needs it. It is
    /// not quantised.
    pub fn whole_sequence(mut self) -> Self {
        self.plan.precision = None;
        self.plan.quantized = None;
        self.plan.replica = self.plan.replica.with_all_rows();
        self
    }

    /// The algorithm of the products. Ranks that compute the same numbers must not tune, because they
    /// may choose differently: their copies of the weights would drift apart.
    fn algorithm(&self) -> GemmAlgorithm {
        let is_repeated = self.plan.group.size() > 1 && !self.plan.replica.is_summed();
        if is_repeated {
            GemmAlgorithm::Deterministic
        } else {
            GemmAlgorithm::Tuned
        }
    }

    /// The weight's main gradient; `None` if the gradient is summed over ranks first. A GEMM adds
    /// only the gradient of this rank's tokens to a [`MainGrad`], and the other ranks' share would
    /// be missing.
    fn main_grad(&self) -> Option<MainGrad> {
        let is_own = !self.plan.replica.is_summed() && !is_adapted(&self.weight);
        is_own.then(|| self.plan.main_grad.clone())
    }

    /// As [`main_grad`](Self::main_grad), of the bias.
    fn bias_grad(&self) -> Option<MainGrad> {
        (!self.plan.replica.is_summed()).then(|| self.plan.bias_grad.clone())
    }
}

/// The random numbers of all features of the layer's output.
fn random_numbers(group: &Group, path: Option<&str>) -> RandomNumbers {
    RandomNumbers::new(group.seed(), path.unwrap_or_default())
}

impl Sharded for ReplicatedLinear {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.drawn_from(self.plan.path.as_deref());
        plan.of_group(&self.plan.group);
        plan.matrix(
            "weight",
            &self.plan.replica.spec(&self.weight),
            self.main_grad(),
        );
        plan.adapter("weight", &self.weight, &self.plan.group);
        if let Some(bias) = &self.bias {
            plan.vector("bias", &self.plan.replica.spec(bias), self.bias_grad());
        }
        plan.quantized(self.plan.quantized.as_ref());
    }
}

impl ModuleDisplay for ReplicatedLinear {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        one_line()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_input, d_output] = self.weight.lazy_shape().dims();
        content
            .add("d_input", &d_input)
            .add("d_output", &d_output)
            .add("bias", &self.bias.is_some())
            .add("ranks", &self.plan.group.size())
            .optional()
    }
}
