use megaburn_collective::Group;
use megaburn_parallel::{ParallelDropout, ParallelDropoutConfig, ParallelError};

/// Dropout probabilities in training, in `[0, 1)`. Masks drop the same elements under every layout,
/// and also when backward recomputes them.
///
/// Source: Srivastava et al. (2014); Megatron-LM `--hidden-dropout` and `--attention-dropout`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Dropout {
    /// Dropout on the outputs of embedding, attention and MLP, which are added to the residual
    /// stream.
    pub hidden: f64,
    /// Dropout on the attention probabilities.
    pub attention: f64,
}

impl Dropout {
    /// The dropout layer for the output of the part at `path`.
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
