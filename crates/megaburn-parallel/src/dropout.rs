use burn::{config::Config, module::Module, tensor::Tensor};
use megaburn_collective::Group;
use megaburn_kernels::{DropoutKey, dropout};
use megaburn_mesh::{PositionRng, Purpose};

use crate::ParallelError;

/// Which tokens of the run a forward pass sees, so that dropout does not depend on the layout.
#[derive(derive_new::new, Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBlock {
    /// Number of the training step.
    pub step: u64,
    /// Samples of the global batch.
    pub global_batch: usize,
    /// Number of this micro-batch's first sample within the global batch.
    pub first_sample: usize,
}

/// Configuration of a [`ParallelDropout`].
#[derive(Config, Debug)]
pub struct ParallelDropoutConfig {
    /// Share of the elements that is dropped.
    pub prob: f64,
    /// The layer's path in the model, which keys its masks.
    pub name: String,
    /// Whether the input holds this rank's stretch of the sequence only.
    #[config(default = false)]
    pub sequence_parallel: bool,
}

impl ParallelDropoutConfig {
    /// The layer.
    ///
    /// # Errors
    /// A share outside of `[0, 1)`.
    pub fn init(&self, group: &Group) -> Result<ParallelDropout, ParallelError> {
        check("ParallelDropout", &self.name, self.prob)?;
        Ok(ParallelDropout { config: self.clone(), group: group.clone() })
    }
}

/// Refuses a share that cannot be dropped.
pub(crate) fn check(layer: &'static str, name: &str, prob: f64) -> Result<(), ParallelError> {
    if (0.0..1.0).contains(&prob) {
        return Ok(());
    }
    let why = format!("dropout {prob} is not in [0, 1)");
    Err(ParallelError::Config { layer, name: name.into(), why })
}

/// Dropout whose mask is a function of `(seed, path, step, position)`: the same elements drop under
/// every layout, and again when an activation is recomputed.
///
/// # Collective
/// None.
#[derive(Module, Debug)]
pub struct ParallelDropout {
    #[module(skip)]
    config: ParallelDropoutConfig,
    #[module(skip)]
    group: Group,
}

impl ParallelDropout {
    /// Drops elements while training; returns the input unchanged on a device without autodiff.
    ///
    /// # Shapes
    /// `[seq, batch, hidden]`, unchanged (with sequence parallelism `seq` is this rank's stretch).
    pub fn forward(&self, x: Tensor<3>, block: &TokenBlock) -> Tensor<3> {
        let ParallelDropoutConfig { prob, name, sequence_parallel } = &self.config;
        if *prob == 0.0 || !x.device().is_autodiff() {
            return x;
        }
        let [seq, _, hidden] = x.dims();
        let shards = if *sequence_parallel { self.group.size() } else { 1 };
        let rng =
            PositionRng::new(self.group.seed(), Purpose::Dropout, name).with_stream(block.step);
        let offset = if *sequence_parallel { self.group.rank() * seq } else { 0 };
        let key = DropoutKey::new(rng, &[seq * shards, block.global_batch, hidden])
            .with_offset(0, offset)
            .with_offset(1, block.first_sample);
        dropout(x, *prob, key)
    }
}
