use burn::{
    config::Config,
    module::{Module, Param},
    nn::Initializer,
    prelude::Device,
    tensor::Tensor,
};
use megaburn_collective::Group;
use megaburn_kernels::{
    MainGrad, NormGrads, NormOptions, RecomputeFn, layer_norm_add, layer_norm_recompute,
    layer_norm_with, rms_norm, rms_norm_add, rms_norm_with,
};

use crate::{PlanBuilder, Recomputable, Sharded, replica::Replica};

/// What a [`Norm`] divides by.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// The root mean square: `x / sqrt(mean(x^2) + eps) * gamma`.
    Rms,
    /// The standard deviation, after the mean is taken off:
    /// `(x - mean) / sqrt(var + eps) * gamma + beta`.
    Layer,
}

/// Configuration of a [`Norm`].
#[derive(Config, Debug)]
pub struct NormConfig {
    /// Features.
    pub d_model: usize,
    /// What it divides by.
    pub kind: NormKind,
    /// Added under the root.
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Whether a layer norm has a beta; an RMS norm has none.
    #[config(default = true)]
    pub bias: bool,
    /// Whether each rank sees rows of its own: the input holds this rank's stretch of the sequence,
    /// or its heads.
    #[config(default = false)]
    pub sequence_parallel: bool,
}

impl NormConfig {
    /// RMSNorm.
    pub fn rms(d_model: usize) -> Self {
        Self::new(d_model, NormKind::Rms)
    }

    /// LayerNorm.
    pub fn layer(d_model: usize) -> Self {
        Self::new(d_model, NormKind::Layer)
    }

    /// The norm, with gamma at one and beta at zero.
    pub fn init(&self, group: &Group, device: &Device) -> Norm {
        let beta = self.bias && self.kind == NormKind::Layer;
        Norm {
            gamma: Initializer::Ones.init([self.d_model], device),
            beta: beta.then(|| Initializer::Zeros.init([self.d_model], device)),
            epsilon: self.epsilon,
            kind: self.kind,
            replica: Replica::of(group, self.sequence_parallel),
            main_grads: Default::default(),
            recompute: false,
        }
    }
}

/// A norm over the last dimension, statistics in f32. Every rank holds gamma and beta.
///
/// Source: Zhang and Sennrich (2019) for RMSNorm; Ba et al. (2016) for LayerNorm.
/// # Collective
/// Forward: none. Backward: with sequence parallelism one all-reduce of each parameter's gradient,
/// because each rank sees its own tokens only.
#[derive(Module, Debug)]
pub struct Norm {
    /// The scale, `[d_model]`.
    pub gamma: Param<Tensor<1>>,
    /// The shift, `[d_model]`; of a layer norm only.
    pub beta: Option<Param<Tensor<1>>>,
    /// Added under the root.
    pub epsilon: f64,
    #[module(skip)]
    kind: NormKind,
    #[module(skip)]
    replica: Replica,
    /// Of gamma and beta.
    #[module(skip)]
    main_grads: [MainGrad; 2],
    recompute: bool,
}

impl Norm {
    /// Applies the norm.
    ///
    /// # Shapes
    /// `[.., d_model]`, unchanged.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let gamma = self.replica.value(&self.gamma);
        match self.kind {
            NormKind::Rms => rms_norm_with(x, gamma, self.options()),
            NormKind::Layer => layer_norm_with(x, gamma, self.beta(), self.options()),
        }
    }

    /// The norm of `x + residual`, and the sum itself, in one pass.
    ///
    /// # Shapes
    /// `[.., d_model]`, unchanged.
    pub fn forward_add<const D: usize>(
        &self,
        x: Tensor<D>,
        residual: Tensor<D>,
    ) -> (Tensor<D>, Tensor<D>) {
        let gamma = self.replica.value(&self.gamma);
        match self.kind {
            NormKind::Rms => rms_norm_add(x, residual, gamma, self.options()),
            NormKind::Layer => layer_norm_add(x, residual, gamma, self.beta(), self.options()),
        }
    }

    /// Whether the layer that reads a result behind a [`Residual`](crate::Residual) computes it once more
    /// backward instead of keeping it: what was normed is kept for the norm's own backward anyway. Off at
    /// first.
    #[must_use]
    pub fn with_recompute(mut self, recompute: bool) -> Self {
        self.recompute = recompute;
        self
    }

    /// `y`, which [`forward`](Self::forward) of `x` gave, or the sum with `x` of
    /// [`forward_add`](Self::forward_add).
    pub(crate) fn input<const D: usize>(&self, y: Tensor<D>, x: &Tensor<D>) -> Recomputable<D> {
        if !self.recompute {
            return y.into();
        }
        let x = x.clone().inner();
        let gamma = self.gamma.val().inner();
        let beta = self.beta.as_ref().map(|beta| beta.val().inner());
        let Self { epsilon, kind, .. } = *self;
        let again = move || match kind {
            NormKind::Rms => rms_norm(x.clone(), gamma.clone(), epsilon),
            NormKind::Layer => {
                layer_norm_recompute(x.clone(), gamma.clone(), beta.clone(), epsilon)
            }
        };
        Recomputable::recomputed(y, RecomputeFn::new(again))
    }

    fn options(&self) -> NormOptions {
        let [gamma, beta] = self.main_grads();
        NormOptions::new(self.epsilon).with_main_grads(NormGrads { gamma, beta })
    }

    /// Where the gradients of gamma and beta are summed; nowhere if they are summed over ranks first.
    fn main_grads(&self) -> [Option<MainGrad>; 2] {
        let is_summed = self.replica.is_summed();
        self.main_grads
            .each_ref()
            .map(|main_grad| (!is_summed).then(|| main_grad.clone()))
    }

    fn beta(&self) -> Option<Tensor<1>> {
        self.beta.as_ref().map(|beta| self.replica.value(beta))
    }

    /// The same layer and weights for whole sequences, as generation needs it.
    pub fn whole_sequence(mut self) -> Self {
        self.replica = self.replica.with_all_rows();
        self
    }
}

impl Sharded for Norm {
    fn shards(&self, plan: &mut PlanBuilder) {
        let [of_gamma, of_beta] = self.main_grads();
        plan.vector("gamma", &self.replica.spec(&self.gamma), of_gamma);
        if let Some(beta) = &self.beta {
            plan.vector("beta", &self.replica.spec(beta), of_beta);
        }
    }
}
