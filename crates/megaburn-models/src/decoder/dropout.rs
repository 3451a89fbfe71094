use megaburn_collective::Group;
use megaburn_parallel::{ParallelDropout, ParallelDropoutConfig, ParallelError};

/// Shares of what training drops, in `[0, 1)`: the same elements under every layout, and again where
/// backward computes something once more.
///
/// Source: Srivastava et al. (2014); Megatron-LM `--hidden-dropout` and `--attention-dropout`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropout {
    /// Of what embedding, attention and MLP put into the residual stream.
    pub hidden: f64,
    /// Of attention's probabilities.
    pub attention: f64,
}

impl Dropout {
    /// That of what the part at `path` puts into the stream.
    pub(super) fn layer(
        self,
        path: &str,
        group: &Group,
        sequence_parallel: bool,
    ) -> Result<ParallelDropout, ParallelError> {
        ParallelDropoutConfig::new(self.hidden, format!("{path}.dropout"))
            .with_sequence_parallel(sequence_parallel)
            .init(group)
    }
}
