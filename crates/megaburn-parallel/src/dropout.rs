use burn::{
    config::Config,
    module::{Content, DisplaySettings, Module, ModuleDisplay},
    tensor::Tensor,
};
use megaburn_collective::Group;
use megaburn_kernels::{DropoutKey, dropout};
use megaburn_mesh::{PositionRng, Purpose, Zigzag};

use crate::{
    display::one_line, error::ParallelError, shards::Sharded, stretches::stretches,
    tokens::TokenBlock,
};

/// Configuration of a [`ParallelDropout`].
#[derive(Config, Debug)]
pub struct ParallelDropoutConfig {
    /// Share of the elements that are dropped.
    pub prob: f64,
    /// The layer's path in the model, which keys the masks.
    pub name: String,
    /// Whether the input is sharded along the sequence.
    #[config(default = false)]
    pub sequence_parallel: bool,
}

impl ParallelDropoutConfig {
    /// Builds the layer. `context` says which chunks of each sequence this rank holds.
    ///
    /// # Errors
    /// `prob` is outside of `[0, 1)`.
    pub fn init(&self, group: &Group, context: Zigzag) -> Result<ParallelDropout, ParallelError> {
        check("ParallelDropout", &self.name, self.prob)?;
        let config = self.clone();
        let group = group.clone();
        Ok(ParallelDropout {
            config,
            group,
            context,
        })
    }
}

/// Refuses a probability outside of `[0, 1)`.
pub(crate) fn check(layer: &'static str, name: &str, prob: f64) -> Result<(), ParallelError> {
    if (0.0..1.0).contains(&prob) {
        return Ok(());
    }
    let why = format!("dropout {prob} is not in [0, 1)");
    Err(ParallelError::Config {
        layer,
        name: name.into(),
        why,
    })
}

/// Dropout whose mask is a function of `(seed, path, step, position)`: the same elements are
/// dropped under every layout and in a recompute.
///
/// # Collective
/// None.
#[derive(Module, Sharded, Debug)]
#[module(custom_display)]
pub struct ParallelDropout {
    #[module(skip)]
    config: ParallelDropoutConfig,
    #[module(skip)]
    group: Group,
    #[module(skip)]
    context: Zigzag,
}

impl ParallelDropout {
    /// Whether elements are dropped in training.
    pub fn drops(&self) -> bool {
        self.config.prob > 0.0
    }

    /// Drops elements in training. Returns the input unchanged if `block`, which keys the masks, is
    /// `None`, and on a device without autodiff.
    ///
    /// # Shapes
    /// `[seq, batch, hidden]`, unchanged (with sequence or context parallelism `seq` is the local
    /// length).
    pub fn forward(&self, x: Tensor<3>, block: Option<TokenBlock>) -> Tensor<3> {
        let ParallelDropoutConfig {
            prob,
            name,
            sequence_parallel,
        } = &self.config;
        let Some(block) = block.filter(|_| self.drops() && x.device().is_autodiff()) else {
            return x;
        };
        let [seq, _, hidden] = x.dims();
        let shards = if *sequence_parallel {
            self.group.size()
        } else {
            1
        };
        let rng =
            PositionRng::new(self.group.seed(), Purpose::Dropout, name).with_stream(block.step);
        let of_rank = seq * shards;
        let len = of_rank * self.context.ranks();
        let key = DropoutKey::new(rng, &[len, block.global_batch, hidden])
            .with_offset(1, block.first_sample);
        let start = if *sequence_parallel {
            self.group.rank() * seq
        } else {
            0
        };
        let stretches = stretches(self.context.ranges(len), start..start + seq);
        let dropped = stretches.into_iter().map(|(rows, position)| {
            let part = if rows.len() == seq {
                x.clone()
            } else {
                x.clone().narrow(0, rows.start, rows.len())
            };
            dropout(part, *prob, key.clone().with_offset(0, position))
        });
        let mut dropped: Vec<_> = dropped.collect();
        if dropped.len() == 1 {
            dropped.swap_remove(0)
        } else {
            Tensor::cat(dropped, 0)
        }
    }
}

impl ModuleDisplay for ParallelDropout {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        one_line()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content
            .add("prob", &self.config.prob)
            .add("ranks", &self.group.size())
            .optional()
    }
}
