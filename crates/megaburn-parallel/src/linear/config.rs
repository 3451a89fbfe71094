use burn::{config::Config, nn::Initializer, prelude::Device};
use megaburn_autograd::MainGrad;
use megaburn_collective::Group;
use megaburn_kernels::RandomNumbers;
use megaburn_mesh::{Axis, FusedPart, ShardSpec, Zigzag};

use super::{
    LinearPlan, ParallelLinear,
    precision::{AmaxReductions, LinearPrecision},
    quantized::QuantizedLayer,
    rounding::{CurrentTokens, HeldRows},
    sequence_shards::sequence_shards,
    split::Split,
};
use crate::{
    error::ParallelError,
    init::{InitDraw, named},
    replicated_parts::ReplicatedParts,
};

/// Configuration of a [`ParallelLinear`].
///
/// [`new`](Self::new) is a drop-in replacement for Burn's `LinearConfig`: full tensors in, full
/// tensors out. [`column`](Self::column) followed by [`row`](Self::row) is Megatron's pair: the
/// features stay split in between, and one all-reduce per direction suffices.
#[derive(Config, Debug)]
pub struct ParallelLinearConfig {
    /// Input features of the unsharded layer.
    pub d_input: usize,
    /// Output features of the unsharded layer.
    pub d_output: usize,
    /// Which dimension is split.
    #[config(default = "Split::Column")]
    pub split: Split,
    /// Whether there is a bias.
    #[config(default = true)]
    pub bias: bool,
    /// Column split: whether the output is all-gathered, so that every rank has all features.
    #[config(default = true)]
    pub gather_output: bool,
    /// Row split: whether the input already holds only this rank's features.
    #[config(default = false)]
    pub input_is_parallel: bool,
    /// Whether the layer is at the edge of a sequence-parallel region. The input of a column split
    /// or the output of a row split is then sharded along the sequence (dim 0).
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// Parts of the split dimension that are split separately and stay split (a fused QKV or
    /// gate-up); `None` means one part. In a column split a part may have fewer units than there
    /// are ranks; neighbours then hold copies.
    pub fused: Option<Vec<FusedPart>>,
    /// How the matrices of the products are quantised; `None` multiplies them as they are.
    pub precision: Option<LinearPrecision>,
    /// The axis of the group that splits the layer: TP for dense layers, ETP for experts.
    #[config(default = "Axis::Tp")]
    pub axis: Axis,
    /// Initializer of weight and bias, as in Burn's `Linear`.
    #[config(
        default = "Initializer::KaimingUniform { gain: 1.0 / f64::sqrt(3.0), fan_out_only: false }"
    )]
    pub initializer: Initializer,
    /// Initializer of the bias, if it differs from the weight's.
    pub bias_initializer: Option<Initializer>,
    /// The layer's path in the model, which keys the draw of its weights. Required in a group of
    /// more than one.
    pub path: Option<String>,
}

named!(ParallelLinearConfig);

impl ParallelLinearConfig {
    /// A column split: full input, this rank's share of the output features.
    pub fn column(d_input: usize, d_output: usize) -> Self {
        Self::new(d_input, d_output).with_gather_output(false)
    }

    /// A row split: this rank's share of the input features, full output.
    pub fn row(d_input: usize, d_output: usize) -> Self {
        Self::new(d_input, d_output)
            .with_split(Split::Row)
            .with_input_is_parallel(true)
    }

    /// Makes the split dimension a concatenation of separately split parts.
    pub fn with_parts(mut self, parts: impl Into<Vec<FusedPart>>) -> Self {
        self.fused = Some(parts.into());
        self
    }

    /// Builds this rank's shard of the layer.
    ///
    /// # Errors
    /// The layer has no name in a group of more than one, the features do not divide, or flags
    /// contradict each other.
    /// # Collective
    /// Nothing is sent; every member of `group` draws its own shard.
    pub fn init(&self, group: &Group, device: &Device) -> Result<ParallelLinear, ParallelError> {
        let plan = self.plan(group)?;
        let draw = |field, initializer| InitDraw {
            layer: "ParallelLinear",
            name: self.path.as_deref(),
            field,
            initializer,
            fans: [self.d_input, self.d_output],
        };
        let weight = draw("weight", &self.initializer).param(&plan.weight_spec, group, device)?;
        let for_bias = self.bias_initializer.as_ref().unwrap_or(&self.initializer);
        let bias = plan.bias_spec.as_ref();
        let bias = bias.map(|spec| draw("bias", for_bias).param(spec, group, device));
        Ok(ParallelLinear {
            weight,
            bias: bias.transpose()?,
            plan,
        })
    }

    /// The split of the layer.
    pub(super) fn plan(&self, group: &Group) -> Result<LinearPlan, ParallelError> {
        self.validate()?;
        let [rows, columns] = [self.d_input, self.d_output];
        let (dim, size) = match self.split {
            Split::Column => (1, columns),
            Split::Row => (0, rows),
        };
        let parts = self
            .fused
            .clone()
            .unwrap_or_else(|| vec![FusedPart::new(size)]);
        let rank = group.rank();
        let ranks = group.size();
        self.check_even(&parts, ranks)?;
        self.check_blocks(&parts, ranks)?;
        let shard = |shape: &[usize], dim| {
            ShardSpec::split(shape, dim, &parts, self.axis, rank, ranks).map_err(|source| {
                ParallelError::Shard {
                    name: self.label(),
                    source,
                }
            })
        };
        let weight_spec = shard(&[rows, columns], dim)?;
        let bias_spec = match (self.bias, self.split) {
            (false, _) => None,
            (true, Split::Column) => Some(shard(&[columns], 0)?),
            (true, Split::Row) => Some(ShardSpec::whole(&[columns], self.axis, rank, ranks)),
        };
        let replicas = ReplicatedParts::of(&weight_spec, group, &self.label())?;
        let reductions = AmaxReductions::of_split(self.split, group, group);
        let quantized = self.precision.map(|precision| {
            let random = self.random_numbers(group, &weight_spec);
            let rows = HeldRows::of_chunks(Zigzag::WHOLE, CurrentTokens::default());
            let shards = sequence_shards(self.split, self.sequence_parallel, group);
            QuantizedLayer::new(precision, reductions, (random, rows)).with_shards(shards)
        });
        Ok(LinearPlan {
            config: self.clone(),
            group: group.clone(),
            weight_spec,
            bias_spec,
            replicas,
            main_grad: MainGrad::default(),
            bias_grad: MainGrad::default(),
            quantized,
            copied_on: None,
        })
    }

    fn label(&self) -> String {
        self.path.clone().unwrap_or_else(|| "unnamed".into())
    }

    fn validate(&self) -> Result<(), ParallelError> {
        let refuse = |why: &str| {
            let layer = "ParallelLinear";
            let name = self.label();
            let why = why.to_string();
            Err(ParallelError::Config { layer, name, why })
        };
        match self.split {
            Split::Row if self.sequence_parallel && !self.input_is_parallel => refuse(
                "a row split with sequence parallelism needs `input_is_parallel`: the sequence and \
                 the features of its input cannot both be split",
            ),
            Split::Row if self.fused.is_some() && !self.input_is_parallel => refuse(
                "a row split of parts needs `input_is_parallel`: an unsharded input is split as \
                one part",
            ),
            Split::Column if self.input_is_parallel => refuse(
                "`input_is_parallel` belongs to a row split; a column split takes all features",
            ),
            Split::Column if self.fused.is_some() && self.gather_output => refuse(
                "`gather_output` with parts would interleave the ranks' shards of them; start \
                from `ParallelLinearConfig::column`",
            ),
            _ => Ok(()),
        }
    }

    /// Refuses parts whose quantised blocks would be cut.
    fn check_blocks(&self, parts: &[FusedPart], ranks: usize) -> Result<(), ParallelError> {
        let features = self.split.features();
        let precision = self.precision.as_ref();
        match precision.and_then(|precision| precision.refusal(parts, ranks, features)) {
            None => Ok(()),
            Some(why) => Err(ParallelError::Config {
                layer: "ParallelLinear",
                name: self.label(),
                why,
            }),
        }
    }

    /// The random numbers of a rank's features of the layer's output, which a quantised layer draws.
    pub(super) fn random_numbers(&self, group: &Group, weight: &ShardSpec) -> RandomNumbers {
        let numbers = RandomNumbers::new(group.seed(), self.path.as_deref().unwrap_or_default());
        match self.split {
            Split::Row => numbers,
            Split::Column => {
                let own = weight.pieces.iter().map(|piece| piece.global.clone());
                numbers.with_cols(own.collect::<Vec<_>>(), self.d_output)
            }
        }
    }

    /// Refuses parts that do not divide evenly over the ranks, except in the fused parts of a
    /// column split: elsewhere the replicas would be counted twice.
    fn check_even(&self, parts: &[FusedPart], ranks: usize) -> Result<(), ParallelError> {
        let copies_allowed = self.split == Split::Column && self.fused.is_some();
        let uneven = parts.iter().find(|part| !part.units.is_multiple_of(ranks));
        let Some(part) = uneven.filter(|_| !copies_allowed) else {
            return Ok(());
        };
        let features = self.split.features();
        let size = part.size();
        let step = ranks * part.unit;
        let why = format!(
            "{size} {features} features are not divisible over {ranks} ranks; use a multiple of \
            {step}, or Burn's `Linear` for a small layer"
        );
        Err(ParallelError::Config {
            layer: "ParallelLinear",
            name: self.label(),
            why,
        })
    }
}
