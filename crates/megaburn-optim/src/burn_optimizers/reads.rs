use burn::optim::{
    AdaGrad, Adafactor, Adam, AdamW, Adan, Lamb, Lion, Muon, Optimizer, RmsProp, Sgd,
};

/// The part of a parameter that an optimizer reads to update one of its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// The same element of the parameter, its gradient and its state. A rank's shard is enough.
    Element,
    /// All elements of the parameter: its norm, its matrix, means over rows. The shards are gathered
    /// for the update.
    Parameter,
}

/// An optimizer that says what it reads, so that [`ShardedOptimizer`](super::ShardedOptimizer) can
/// run it on shards. All optimizers of Burn do; implement it for your own:
///
/// ```
/// use burn::{
///     optim::{LearningRate, Optimizer, SgdState},
///     prelude::Device,
///     tensor::Tensor,
/// };
/// use megaburn_optim::{Reads, ShardRule};
///
/// #[derive(Clone)]
/// struct SignSgd;
///
/// impl Optimizer for SignSgd {
///     type State<const D: usize> = SgdState<D>;
///
///     fn step<const D: usize>(
///         &self,
///         lr: LearningRate,
///         tensor: Tensor<D>,
///         grad: Tensor<D>,
///         _state: Option<SgdState<D>>,
///     ) -> (Tensor<D>, Option<SgdState<D>>) {
///         (tensor - grad.sign().mul_scalar(lr), None)
///     }
///
///     fn to_device<const D: usize>(state: SgdState<D>, _device: &Device) -> SgdState<D> {
///         state
///     }
/// }
///
/// impl ShardRule for SignSgd {
///     const READS: Reads = Reads::Element;
/// }
/// ```
///
/// L-BFGS reads all parameters at once and has a function of its own,
/// [`lbfgs_step`](super::lbfgs_step):
///
/// ```compile_fail,E0277
/// use burn::optim::LBFGSConfig;
/// use megaburn_optim::ShardedOptimizer;
///
/// let optimizer = ShardedOptimizer::new(LBFGSConfig::new().init());
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say whether a rank's shard is enough for its update",
    label = "not a `ShardRule`",
    note = "give the optimizer that `build()` returns, as in `AdamWConfig::new().build()`; for an optimizer of your \
        own, implement `ShardRule`; for L-BFGS, call `lbfgs_step`"
)]
pub trait ShardRule: Optimizer {
    /// The part of a parameter that it reads.
    const READS: Reads;
}

macro_rules! reads {
    ($reads:ident: $($optimizer:ty),*) => {
        $(impl ShardRule for $optimizer {
            const READS: Reads = Reads::$reads;
        })*
    };
}

reads!(Element: AdaGrad, Adam, AdamW, Adan, Lion, RmsProp, Sgd);
// The ratio of two norms; a matrix that is made orthogonal; means over rows, columns and all.
reads!(Parameter: Adafactor, Lamb, Muon);
