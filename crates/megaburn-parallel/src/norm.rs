use burn::{
    config::Config,
    module::{Content, DisplaySettings, Module, ModuleDisplay, Param},
    nn::Initializer,
    prelude::Device,
    tensor::Tensor,
};
use megaburn_autograd::{MainGrad, RecomputeFn};
use megaburn_collective::Group;
use megaburn_kernels::{
    NormAmaxes, NormGrads, NormOptions, layer_norm_add, layer_norm_recompute, layer_norm_with,
    rms_norm_add, rms_norm_with,
};
use megaburn_mesh::{FusedPart, ShardSpec};

use crate::{
    display::one_line,
    error::ParallelError,
    recomputable::Recomputable,
    replica::Replica,
    shards::{PlanBuilder, Sharded},
    split_norm::NormSplit,
};

/// What a [`Norm`] divides by.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// The root mean square: `x / sqrt(mean(x^2) + eps) * gamma`.
    Rms,
    /// The standard deviation, after the mean is subtracted:
    /// `(x - mean) / sqrt(var + eps) * gamma + beta`.
    Layer,
}

/// Configuration of a [`Norm`].
#[derive(Config, Debug)]
pub struct NormConfig {
    /// Features of the normalized dimension.
    pub d_model: usize,
    /// What the norm divides by.
    pub kind: NormKind,
    /// Added under the square root.
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Whether a layer norm has a beta; an RMS norm never has one.
    #[config(default = true)]
    pub bias: bool,
    /// Whether the result is scaled by `1 + gamma`, with gamma starting at zero (Megatron's
    /// `--apply-layernorm-1p`, Gemma).
    #[config(default = false)]
    pub zero_centered_gamma: bool,
    /// Whether each rank sees rows of its own: its shard of the sequence, or its heads.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// Whether backward recomputes the normalized result of
    /// [`Residual::normed`](crate::Residual::normed) instead of the layer that reads it keeping it.
    /// The norm's input is saved for its own backward anyway.
    #[config(default = false)]
    pub recompute: bool,
}

impl NormConfig {
    /// Configures an RMSNorm.
    pub fn rms(d_model: usize) -> Self {
        Self::new(d_model, NormKind::Rms)
    }

    /// Configures a LayerNorm.
    pub fn layer(d_model: usize) -> Self {
        Self::new(d_model, NormKind::Layer)
    }

    /// Builds the norm, with a scale of one and beta at zero.
    pub fn init(&self, group: &Group, device: &Device) -> Norm {
        let beta = self.bias && self.kind == NormKind::Layer;
        let gamma = if self.zero_centered_gamma {
            Initializer::Zeros
        } else {
            Initializer::Ones
        };
        Norm {
            gamma: gamma.init([self.d_model], device),
            beta: beta.then(|| Initializer::Zeros.init([self.d_model], device)),
            epsilon: self.epsilon,
            zero_centered_gamma: self.zero_centered_gamma,
            kind: self.kind,
            replica: Replica::of(group, self.sequence_parallel),
            main_grads: Default::default(),
            recompute: self.recompute,
            split: None,
        }
    }

    /// Builds the norm of features that are split over the ranks as `part`, e.g. all heads that a
    /// column split produces. Gamma and beta are split in the same way.
    ///
    /// # Errors
    /// The ranks do not divide the part.
    /// # Collective
    /// Nothing is sent, but all members build the norm together.
    pub(crate) fn init_split(
        &self,
        part: FusedPart,
        name: &str,
        group: &Group,
        device: &Device,
    ) -> Result<Norm, ParallelError> {
        let split = NormSplit::new(part, name, group)?;
        let of_rank = Self {
            d_model: split.local_len(),
            ..self.clone()
        };
        Ok(Norm {
            split: Some(split),
            ..of_rank.init(group, device)
        })
    }
}

/// A norm over the last dimension, with statistics in f32. Gamma and beta are replicated, unless the
/// dimension is split over the ranks (the norm of all heads of [`QkNorm`](crate::QkNorm)).
///
/// Source: Zhang and Sennrich (2019) for RMSNorm; Ba et al. (2016) for LayerNorm.
/// # Collective
/// Forward: none. Backward: with sequence parallelism one all-reduce of each parameter's gradient,
/// because each rank sees its own tokens only.
///
/// If the dimension is split: one all-reduce of the sums of each row, forward and backward.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Norm {
    /// The scale, `[d_model]`.
    pub gamma: Param<Tensor<1>>,
    /// The shift, `[d_model]`; only a layer norm has one.
    pub beta: Option<Param<Tensor<1>>>,
    /// Added under the square root.
    pub epsilon: f64,
    /// Whether the result is scaled by `1 + gamma`.
    pub zero_centered_gamma: bool,
    #[module(skip)]
    kind: NormKind,
    #[module(skip)]
    replica: Replica,
    /// The main gradients of gamma and beta.
    #[module(skip)]
    main_grads: [MainGrad; 2],
    recompute: bool,
    #[module(skip)]
    split: Option<NormSplit>,
}

impl Norm {
    /// Applies the norm.
    ///
    /// # Shapes
    /// `[.., d_model]`, unchanged.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.forward_observed(x, NormAmaxes::default())
    }

    /// [`forward`](Self::forward), which also finds largest magnitudes. The norm of a split dimension
    /// finds none.
    pub(crate) fn forward_observed<const D: usize>(
        &self,
        x: Tensor<D>,
        amaxes: NormAmaxes,
    ) -> Tensor<D> {
        if let Some(split) = self.split_over_ranks() {
            let beta = self.beta.as_ref().map(Param::val);
            let centered = self.kind == NormKind::Layer;
            return split.normed(x, centered, self.gamma.val(), beta, &self.plain_options());
        }
        let gamma = self.replica.value(&self.gamma);
        let options = self.options().with_amaxes(amaxes);
        match self.kind {
            NormKind::Rms => rms_norm_with(x, gamma, options),
            NormKind::Layer => layer_norm_with(x, gamma, self.beta(), options),
        }
    }

    /// Computes the sum `x + residual` and its norm in one pass. Returns the norm, then the sum.
    ///
    /// # Shapes
    /// `[.., d_model]`, unchanged.
    pub fn forward_add<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Tensor<D>,
    ) -> (Tensor<D>, Tensor<D>) {
        self.forward_add_observed(x, residual, NormAmaxes::default())
    }

    /// As [`forward_observed`](Self::forward_observed), of [`forward_add`](Self::forward_add).
    pub(crate) fn forward_add_observed<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Tensor<D>,
        amaxes: NormAmaxes,
    ) -> (Tensor<D>, Tensor<D>) {
        if self.split_over_ranks().is_some() {
            let sum = x + residual;
            return (self.forward(sum.clone()), sum);
        }
        let gamma = self.replica.value(&self.gamma);
        let options = self.options().with_amaxes(amaxes);
        match self.kind {
            NormKind::Rms => rms_norm_add(x, residual, gamma, options),
            NormKind::Layer => layer_norm_add(x, residual, gamma, self.beta(), options),
        }
    }

    /// Wraps `y`, the norm of `x`, as the input of a layer, which recomputes it if so configured.
    /// `x` is the input of [`forward`](Self::forward), or the sum that
    /// [`forward_add`](Self::forward_add) returned.
    pub(crate) fn input<const D: usize>(&self, y: Tensor<D>, x: &Tensor<D>) -> Recomputable<D> {
        if !self.recompute || self.split_over_ranks().is_some() {
            return y.into();
        }
        let x = x.clone().inner();
        let gamma = self.gamma.val().inner();
        let beta = self.beta.as_ref().map(|beta| beta.val().inner());
        let kind = self.kind;
        let options = self.plain_options();
        let again = move || match kind {
            NormKind::Rms => rms_norm_with(x.clone(), gamma.clone(), options.clone()),
            NormKind::Layer => {
                layer_norm_recompute(x.clone(), gamma.clone(), beta.clone(), options.clone())
            }
        };
        Recomputable::recomputed(y, RecomputeFn::new(again))
    }

    fn options(&self) -> NormOptions {
        let [gamma, beta] = self.main_grads();
        self.plain_options()
            .with_main_grads(NormGrads { gamma, beta })
    }

    /// The options without main gradients.
    fn plain_options(&self) -> NormOptions {
        NormOptions::new(self.epsilon).with_zero_centered_gamma(self.zero_centered_gamma)
    }

    /// The main gradients of gamma and beta; `None` if their gradients are summed over ranks first.
    fn main_grads(&self) -> [Option<MainGrad>; 2] {
        let is_summed = self.replica.is_summed() || self.split_over_ranks().is_some();
        self.main_grads
            .each_ref()
            .map(|main_grad| (!is_summed).then(|| main_grad.clone()))
    }

    /// The split of the features, if more than one rank holds them.
    fn split_over_ranks(&self) -> Option<&NormSplit> {
        self.split.as_ref().filter(|split| split.num_ranks() > 1)
    }

    /// The part of a parameter that this rank holds.
    fn spec(&self, param: &Param<Tensor<1>>) -> ShardSpec {
        match &self.split {
            Some(split) => split.spec().clone(),
            None => self.replica.spec(param),
        }
    }

    fn beta(&self) -> Option<Tensor<1>> {
        self.beta.as_ref().map(|beta| self.replica.value(beta))
    }

    /// Returns the norm with the same weights for full sequences, as generation needs it.
    pub fn whole_sequence(mut self) -> Self {
        self.replica = self.replica.with_all_rows();
        self
    }
}

impl Sharded for Norm {
    fn shards(&self, plan: &mut PlanBuilder) {
        let [of_gamma, of_beta] = self.main_grads();
        plan.vector("gamma", &self.spec(&self.gamma), of_gamma);
        if let Some(beta) = &self.beta {
            plan.vector("beta", &self.spec(beta), of_beta);
        }
    }
}

impl ModuleDisplay for Norm {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        one_line()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let kind = match self.kind {
            NormKind::Rms => "rms",
            NormKind::Layer => "layer",
        };
        let split = match self.split_over_ranks() {
            Some(_) => "features",
            None => "none",
        };
        content
            .add("kind", &kind.to_owned())
            .add("d_model", &self.spec(&self.gamma).global_shape[0])
            .add("epsilon", &self.epsilon)
            .add("split", &split.to_owned())
            .add("ranks", &self.replica.group().size())
            .optional()
    }
}
