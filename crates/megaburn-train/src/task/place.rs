//! Where a rank's part of a model is.

use burn::prelude::Device;
use megaburn_collective::{Group, ProcessGroups};

use super::stage::Stage;

/// The ranks, the device and the stages for which a rank builds its part of a model.
#[derive(Debug)]
pub struct ModelPlace<'a> {
    /// The process groups of the rank.
    pub groups: &'a ProcessGroups,
    /// The device of the parameters, with autodiff.
    pub device: &'a Device,
    /// The stages of the rank; one that is the full model without a pipeline.
    pub stages: &'a [Stage],
}

impl ModelPlace<'_> {
    /// The ranks that split the matrices of a layer.
    pub fn tp(&self) -> &Group {
        &self.groups.tp
    }

    /// Whether the rank holds what comes before the blocks.
    pub fn is_first(&self) -> bool {
        self.stages.iter().any(|stage| stage.is_first)
    }

    /// Whether the rank holds what comes after the blocks.
    pub fn is_last(&self) -> bool {
        self.stages.iter().any(|stage| stage.is_last)
    }

    /// Whether the rank holds block `block`.
    pub fn has_block(&self, block: usize) -> bool {
        self.stages
            .iter()
            .any(|stage| stage.blocks.contains(&block))
    }

    /// Builds the blocks that the rank holds, and `None` in the place of the others.
    ///
    /// # Errors
    /// The first error of `build`.
    pub fn blocks<B, E>(
        &self,
        num_blocks: usize,
        build: impl Fn(usize) -> Result<B, E>,
    ) -> Result<Vec<Option<B>>, E> {
        let built = (0..num_blocks).map(|block| {
            let is_here = self.has_block(block);
            is_here.then(|| build(block)).transpose()
        });
        built.collect()
    }
}
