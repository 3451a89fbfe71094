//! The precision of one linear layer, which may change from step to step.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::Tensor;
use megaburn_kernels::{
    AmaxReduction, AmaxSource, DelayedAmax, FoundAmax, KeptWeight, LinearOptions,
    LinearQuantization, MatrixRole, QuantizationCounts, RandomNumbers, SentAmax, SequenceShards,
    WeightSpan, linear, quantized_linear,
};

use super::precision::{AmaxReductions, LinearPrecision};
use super::rounding::HeldRows;

/// The precision of one linear layer's products. Clones share it, so the trainer can
/// [set](Self::set) another one between two steps, while the layer is in a model. Within a step all
/// passes must see the same one, those that are recomputed too.
#[derive(Clone, Debug)]
pub struct QuantizedLayer {
    state: Arc<Mutex<LayerState>>,
    input: Matrix,
    weight: Matrix,
    gradient: Matrix,
    kept: Option<KeptWeight>,
    weight_amax: FoundAmax,
    sent_amax: SentAmax,
    counts: QuantizationCounts,
    /// The shards of tokens that may be gathered as quantised elements, if the layer has such, and
    /// the reduction over the ranks that hold parts of their matrix.
    shards: Option<SequenceShards>,
    of_shards: Option<AmaxReduction>,
    /// The layer's random numbers, and which rows of the gradient this rank has.
    random: (RandomNumbers, HeldRows),
}

#[derive(Debug)]
struct LayerState {
    /// `None` while products are computed in the type of the parameters.
    precision: Option<LinearPrecision>,
    is_counted: bool,
}

/// A matrix of which other ranks hold parts if there is a reduction.
#[derive(Clone, Debug)]
struct Matrix {
    reduction: Option<AmaxReduction>,
    delayed: DelayedAmax,
}

impl QuantizedLayer {
    /// A layer that draws random numbers if the recipe does.
    pub(super) fn new(
        precision: LinearPrecision,
        reductions: AmaxReductions,
        random: (RandomNumbers, HeldRows),
    ) -> Self {
        Self {
            state: Arc::new(Mutex::new(LayerState {
                precision: Some(precision),
                is_counted: false,
            })),
            input: Matrix::new(reductions.input),
            weight: Matrix::new(reductions.weight),
            gradient: Matrix::new(reductions.gradient),
            kept: None,
            weight_amax: FoundAmax::default(),
            sent_amax: SentAmax::default(),
            counts: QuantizationCounts::default(),
            shards: None,
            of_shards: reductions.shards,
            random,
        }
    }

    /// The layer with shards of tokens, which it may gather.
    pub(super) fn with_shards(self, shards: Option<SequenceShards>) -> Self {
        Self { shards, ..self }
    }

    /// The layer in a model: its quantised weight is kept while weights do not change.
    pub(super) fn kept_in(mut self, weights: &WeightSpan) -> Self {
        self.kept = Some(KeptWeight::new(weights));
        self
    }

    /// Sets the precision of the next passes; `None` computes products in the type of the
    /// parameters.
    pub fn set(&self, precision: Option<LinearPrecision>) {
        self.lock().precision = precision;
    }

    /// Sets whether the elements that saturate or underflow in the next passes are
    /// [counted](Self::counts).
    pub fn set_counted(&self, is_counted: bool) {
        self.lock().is_counted = is_counted;
    }

    /// Whether the layer needs the largest magnitudes of its matrices now.
    pub fn needs_amaxes(&self) -> bool {
        let precision = self.lock().precision;
        precision.is_some_and(|precision| precision.recipe.needs_amax())
    }

    /// Sets the largest magnitude of this rank's part of the weight, `[1]` in f32, which the next pass
    /// then does not find. It must be unset before the weight changes.
    pub fn set_weight_amax(&self, amax: Option<Tensor<1>>) {
        self.weight_amax.set(amax);
    }

    /// The largest magnitude of the weight that was set and no pass has taken.
    pub fn weight_amax(&self) -> Option<Tensor<1>> {
        self.weight_amax.value()
    }

    /// The elements that saturated or underflowed in training on this rank.
    pub fn counts(&self) -> &QuantizationCounts {
        &self.counts
    }

    /// The largest magnitudes of a matrix, by which its scale is derived while scales are delayed.
    pub fn delayed(&self, role: MatrixRole) -> &DelayedAmax {
        &self.matrix(role).delayed
    }

    /// Whether the layer now gathers its shards of tokens itself, and scatters its result or the
    /// gradient of its input.
    pub(super) fn gathers(&self) -> bool {
        let precision = self.lock().precision;
        self.shards.is_some() && precision.is_some_and(|of| of.gathers_quantized())
    }

    /// The largest magnitude of the weight, if it was rounded to be sent. Whoever rounds it sets it.
    pub fn sent_amax(&self) -> &SentAmax {
        &self.sent_amax
    }

    /// How the largest magnitude of the weight is reduced over the ranks that hold parts of it.
    pub fn weight_reduction(&self) -> Option<&AmaxReduction> {
        self.weight.reduction.as_ref()
    }

    /// How the matrices are quantised now.
    pub(super) fn quantization(&self) -> Option<LinearQuantization> {
        let (precision, is_counted) = {
            let state = self.lock();
            (state.precision?, state.is_counted)
        };
        let shards = self.shards.clone();
        let shards = shards.filter(|_| precision.gathers_quantized());
        let source = |role| {
            let matrix = self.matrix(role);
            let is_sharded = shards.as_ref().is_some_and(|shards| shards.of == role);
            let reduction = match is_sharded {
                true => self.of_shards.clone(),
                false => matrix.reduction.clone(),
            };
            match precision.delayed {
                true => AmaxSource::Delayed(matrix.delayed.reduced_by(reduction)),
                false => AmaxSource::Current(reduction),
            }
        };
        Some(LinearQuantization {
            recipe: precision.recipe,
            input: source(MatrixRole::Input),
            weight: source(MatrixRole::Weight),
            gradient: source(MatrixRole::Gradient),
            weight_amax: Some(self.weight_amax.clone()),
            sent_amax: self.sent_amax.get(),
            kept: self.kept.clone(),
            counts: is_counted.then(|| self.counts.clone()),
            random: self.random.0.clone(),
            shards,
        })
    }

    fn matrix(&self, role: MatrixRole) -> &Matrix {
        match role {
            MatrixRole::Input => &self.input,
            MatrixRole::Weight => &self.weight,
            MatrixRole::Gradient => &self.gradient,
        }
    }

    fn lock(&self) -> MutexGuard<'_, LayerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Matrix {
    fn new(reduction: Option<AmaxReduction>) -> Self {
        Self {
            delayed: DelayedAmax::new(None),
            reduction,
        }
    }
}

/// `x W + bias`, of quantised matrices if the layer is quantised.
pub(super) fn product<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    options: LinearOptions,
    layer: Option<&QuantizedLayer>,
) -> Tensor<D> {
    let quantized = layer.and_then(|layer| Some((layer, layer.quantization()?)));
    let Some((layer, mut quantization)) = quantized else {
        return linear(x, weight, bias, options);
    };
    if !x.device().is_autodiff() {
        quantization = quantization.without_record();
    } else if quantization
        .recipe
        .rounds_stochastically(MatrixRole::Gradient)
    {
        let rows = x.dims()[..D - 1].iter().product();
        quantization.random = layer.random.1.numbers(quantization.random, rows);
    }
    quantized_linear(x, weight, bias, options, quantization)
}
