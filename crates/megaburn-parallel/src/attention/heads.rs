//! The heads of a rank.

use burn::tensor::Tensor;
use megaburn_collective::{
    Group,
    region::{copy_to, gather_from_sequence},
};
use megaburn_kernels::{RopeTable, apply_rope};

use super::alibi::{Alibi, AlibiKeys, with_features};

/// How projected features are divided into the heads of this rank.
#[derive(Clone, Debug)]
pub(super) enum Heads {
    Grouped(GroupedHeads),
    Latent(LatentHeads),
}

/// How the output of the QKV projection is divided.
#[derive(Clone, Debug)]
pub(super) struct GroupedHeads {
    /// Query heads and key/value heads of this rank.
    pub(super) count: [usize; 2],
    /// Query heads that share a key/value head.
    pub(super) queries_per_key: usize,
    pub(super) head_dim: usize,
    /// Whether all heads together have one norm, with a scale for each of their features.
    pub(super) norm_by_width: bool,
    /// The ALiBi of this rank's heads, if they have it.
    pub(super) alibi: Option<AlibiHeads>,
    /// Epsilon of the norm without a scale over each query and key head, if there is one.
    pub(super) l2_norm: Option<f64>,
}

/// The ALiBi of a rank's heads.
#[derive(Clone, Debug)]
pub(super) struct AlibiHeads {
    pub(super) form: Alibi,
    /// The slope of each query head.
    pub(super) slopes: Vec<f64>,
    /// Factor of the scores.
    pub(super) scale: f64,
}

impl AlibiHeads {
    /// Queries and keys with the features of ALiBi.
    pub(super) fn widened(
        &self,
        q: Tensor<4>,
        k: Tensor<4>,
        keys: Option<&AlibiKeys>,
    ) -> [Tensor<4>; 2] {
        let keys = keys.expect("a layer with ALiBi is given the positions of its keys");
        let device = q.device().inner();
        let slopes = self
            .form
            .of_queries(&self.slopes, self.scale, &device, q.dtype());
        [with_features(q, slopes), keys.added_to(k)]
    }
}

/// How the projections of latents are divided.
#[derive(Clone, Debug)]
pub(super) struct LatentHeads {
    /// Heads of this rank.
    pub(super) count: usize,
    /// Features of a head's queries and keys that are not rotated, and that are rotated.
    pub(super) nope: usize,
    pub(super) rope: usize,
    /// Features of a head's values.
    pub(super) values: usize,
    pub(super) group: Group,
    pub(super) sequence_parallel: bool,
}

impl LatentHeads {
    /// The same heads for full sequences.
    pub(super) fn whole_sequence(self) -> Self {
        Self {
            sequence_parallel: false,
            ..self
        }
    }

    /// Makes `x` an input of every rank's heads, for all tokens, like the input of a column split.
    pub(super) fn for_all_heads(&self, x: Tensor<3>) -> Tensor<3> {
        if self.sequence_parallel {
            gather_from_sequence(x, &self.group)
        } else {
            copy_to(x, &self.group)
        }
    }
}

/// The rotation of queries or keys; without a table they are unchanged.
pub(super) fn rotated(x: Tensor<4>, rope: Option<&RopeTable>) -> Tensor<4> {
    match rope {
        Some(rope) => apply_rope(x, rope),
        None => x,
    }
}
