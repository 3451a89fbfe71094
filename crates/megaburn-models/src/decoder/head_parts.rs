use burn::prelude::Device;
use megaburn_collective::Group;
use megaburn_parallel::{
    Norm, ParallelError, ReplicatedLinear, ReplicatedLinearConfig, VocabParallelBias,
    VocabParallelBiasConfig,
};

use super::{DecoderConfig, builder::ModelBuilder};

/// The path of a family's own output head in the model.
pub(super) const OUTPUT_HEAD: &str = "output_head";

/// Builds the layers of a family's [output head](super::OutputHead) as the model's own layers are
/// built: for the model's groups and options, and with its initial deviation.
#[derive(Debug)]
pub struct HeadParts<'a>(pub(super) &'a ModelBuilder<'a>);

impl HeadParts<'_> {
    /// The sizes and the parts of the model.
    pub fn config(&self) -> &DecoderConfig {
        self.0.config
    }

    /// The tensor-parallel group, over which the vocabulary is split.
    pub fn group(&self) -> &Group {
        &self.0.groups.layers.tp
    }

    /// Whether each rank of the group sees its own shard of the sequence.
    pub fn sequence_parallel(&self) -> bool {
        self.0.options.sequence_parallel
    }

    /// The device of the model.
    pub fn device(&self) -> &Device {
        self.0.device
    }

    /// A norm of the model's kind and width.
    pub fn norm(&self) -> Norm {
        self.0.norm(false)
    }

    /// A linear layer with a bias, replicated on all ranks. `field` is its field in the head, which
    /// keys the draw of its weight.
    ///
    /// # Shapes
    /// `[.., d_input]` to `[.., d_output]`
    ///
    /// # Errors
    /// See [`ReplicatedLinearConfig::init`].
    pub fn linear(
        &self,
        field: &str,
        d_input: usize,
        d_output: usize,
    ) -> Result<ReplicatedLinear, ParallelError> {
        ReplicatedLinearConfig::new(d_input, d_output)
            .with_bias(true)
            .with_sequence_parallel(self.sequence_parallel())
            .with_initializer(self.0.initializer())
            .with_name(format!("{OUTPUT_HEAD}.{field}"))
            .init(self.group(), self.device())
    }

    /// A bias of the logits, split over the ranks as the vocabulary is.
    ///
    /// # Errors
    /// See [`VocabParallelBiasConfig::init`].
    pub fn vocab_bias(&self) -> Result<VocabParallelBias, ParallelError> {
        VocabParallelBiasConfig::new(self.config().vocab).init(self.group(), self.device())
    }
}
