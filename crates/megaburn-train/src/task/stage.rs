//! The stages of a model that a pipeline splits.

use std::{collections::BTreeMap, ops::Range};

use megaburn_pipeline::StageLayers;

/// A part of a model that one stage of a pipeline computes. Without a pipeline it is the full model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// The blocks of the stage, numbered from 0 in the full model.
    pub blocks: Range<usize>,
    /// Whether the stage begins with the micro-batch.
    pub is_first: bool,
    /// Whether the stage ends with the loss.
    pub is_last: bool,
}

impl From<&StageLayers> for Stage {
    fn from(layers: &StageLayers) -> Self {
        Self {
            blocks: layers.layers.clone(),
            is_first: layers.embedding,
            is_last: layers.loss,
        }
    }
}

/// How a pipeline splits a model: into equal blocks, between which tensors of one shape go from stage
/// to stage.
///
/// Parameters before the blocks in the module belong to the first stage, and those after them to the
/// last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineSplit {
    pub(super) num_blocks: usize,
    pub(super) shape: [usize; 3],
    pub(super) field: &'static str,
    pub(super) tied: Vec<&'static str>,
}

impl PipelineSplit {
    /// A model of `num_blocks` blocks, in its field `blocks` of type `Vec<Option<_>>`, where `None` is
    /// a block of another stage. `shape` is that of the tensor between two blocks on one rank, for a
    /// micro-batch of `train.micro_batch` samples.
    pub fn new(num_blocks: usize, shape: [usize; 3]) -> Self {
        Self {
            num_blocks,
            shape,
            field: "blocks",
            tied: Vec::new(),
        }
    }

    /// Sets the path of the blocks in the module, in place of `blocks`.
    #[must_use]
    pub fn with_field(mut self, field: &'static str) -> Self {
        self.field = field;
        self
    }

    /// Names a parameter that both the first and the last stage hold, such as an embedding whose
    /// matrix also computes logits. Its gradients are summed over both.
    #[must_use]
    pub fn with_tied(mut self, path: &'static str) -> Self {
        self.tied.push(path);
        self
    }

    /// The parameters of a stage that another stage holds too.
    pub(super) fn tied_in(&self, layers: &StageLayers) -> Vec<&'static str> {
        match layers.embedding || layers.loss {
            true => self.tied.clone(),
            false => Vec::new(),
        }
    }

    /// The block that a parameter belongs to; `None` for one outside the blocks.
    fn block_of(&self, path: &str) -> Option<usize> {
        let inner = path.strip_prefix(self.field)?.strip_prefix('.')?;
        inner.split('.').next()?.parse().ok()
    }

    /// For each parameter of a rank, in the module's order, the one of its `stages` that it belongs
    /// to.
    pub(super) fn chunks(&self, paths: Vec<String>, stages: &[Stage]) -> BTreeMap<String, usize> {
        let mut is_before = true;
        let mut chunk_of = |path: &str| {
            let block = self.block_of(path);
            is_before &= block.is_none();
            let is_in = |stage: &Stage| match block {
                Some(block) => stage.blocks.contains(&block),
                None if is_before => stage.is_first,
                None => stage.is_last,
            };
            let other_end = |stage: &Stage| stage.is_first || stage.is_last;
            let found = stages.iter().position(is_in);
            found.or_else(|| stages.iter().position(other_end))
        };
        let chunks = paths.into_iter().map(|path| {
            let chunk = chunk_of(&path).unwrap_or_default();
            (path, chunk)
        });
        chunks.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(blocks: Range<usize>, num_blocks: usize) -> Stage {
        Stage {
            is_first: blocks.start == 0,
            is_last: blocks.end == num_blocks,
            blocks,
        }
    }

    #[test]
    fn parameters_belong_to_the_stage_of_their_block() {
        let split = PipelineSplit::new(4, [1, 1, 1]).with_field("body.blocks");
        let names = |paths: &[&str]| paths.iter().map(|path| path.to_string()).collect();
        let found = |paths: &[&str], stages: &[Stage]| -> Vec<usize> {
            let chunks = split.chunks(names(paths), stages);
            paths.iter().map(|path| chunks[*path]).collect()
        };
        // The first rank of zb-v has both ends.
        let ends = [stage(0..1, 4), stage(3..4, 4)];
        let paths = [
            "embed.weight",
            "body.blocks.0.up.weight",
            "body.blocks.3.up.weight",
            "norm.gamma",
        ];
        assert_eq!(found(&paths, &ends), [0, 0, 1, 1]);
        // A rank without blocks before the loss.
        let last = [stage(1..2, 4), stage(3..4, 4)];
        assert_eq!(found(&["head.weight"], &last), [1]);
    }
}
