//! Cases: the sizes and options of a layer and its input.

use std::{collections::BTreeMap, convert::Infallible};

use burn::{nn::Initializer, tensor::Tensor};
use megaburn_collective::ProcessGroups;
use megaburn_kernels::{RopeConfig, RopeLayout, RopeScaling, RopeTable, YarnScaling};
use megaburn_mesh::PackedRows;
use megaburn_parallel::{
    Attention, AttentionGroups, BatchContext, ContextComm, ContextParallel,
    MultiLatentAttentionConfig, ParallelError, load_params, read_params,
};

use crate::{
    sequences::Subject,
    support::{autodiff, normal},
};

/// A layer and its sequences.
#[derive(Clone, Debug)]
pub(super) struct Case {
    /// `[s, b]`.
    pub(super) tokens: [usize; 2],
    pub(super) hidden: usize,
    pub(super) heads: usize,
    pub(super) q_rank: Option<usize>,
    pub(super) kv_rank: usize,
    /// Head sizes: unrotated and rotated features of queries and keys, and values.
    pub(super) dims: [usize; 3],
    pub(super) yarn: Option<YarnScaling>,
    pub(super) documents: Option<Vec<Vec<usize>>>,
    pub(super) dropout: f64,
    pub(super) again: bool,
    /// Whether the context-parallel ranks are given with the tokens instead of to the layer.
    pub(super) told: bool,
}

impl Case {
    /// Even sizes; query and value heads have the same size.
    pub(super) fn even(tokens: [usize; 2], heads: usize) -> Self {
        Self {
            tokens,
            hidden: 16,
            heads,
            q_rank: Some(8),
            kv_rank: 12,
            dims: [8, 4, 12],
            yarn: Some(yarn()),
            documents: None,
            dropout: 0.0,
            again: false,
            told: false,
        }
    }

    /// Odd sizes.
    pub(super) fn ragged(tokens: [usize; 2], heads: usize) -> Self {
        let q_rank = Some(7);
        let kv_rank = 5;
        let dims = [3, 6, 5];
        Self {
            hidden: 11,
            q_rank,
            kv_rank,
            dims,
            ..Self::even(tokens, heads)
        }
    }

    pub(super) fn config(&self) -> MultiLatentAttentionConfig {
        let [nope, rope, values] = self.dims;
        let scale = self
            .yarn
            .as_ref()
            .map(|yarn| self.scale() * yarn.score_factor());
        MultiLatentAttentionConfig::new(self.hidden, self.heads, self.kv_rank, nope, rope, values)
            .with_q_lora_rank(self.q_rank)
            .with_softmax_scale(scale)
            // A standard deviation large enough that the scores matter.
            .with_initializer(Initializer::Normal {
                mean: 0.0,
                std: 0.4,
            })
            .with_name("blocks.0.attention")
    }

    pub(super) fn scale(&self) -> f64 {
        ((self.dims[0] + self.dims[1]) as f64).powf(-0.5)
    }
}

/// YaRN for contexts four times as long as in training.
fn yarn() -> YarnScaling {
    YarnScaling::new(4.0, 16)
        .with_mscale(Some(1.0))
        .with_mscale_all_dim(Some(0.6))
}

impl Subject for Case {
    type Layer = Attention;

    fn shape(&self) -> [usize; 3] {
        [self.tokens[0], self.tokens[1], self.hidden]
    }

    fn rope(&self) -> RopeConfig {
        RopeConfig::new(self.dims[1])
            .with_theta(50.0)
            .with_layout(RopeLayout::Interleaved)
            .with_scaling(
                self.yarn
                    .clone()
                    .map_or(RopeScaling::None, RopeScaling::Yarn),
            )
    }

    fn documents(&self) -> Option<PackedRows> {
        self.documents
            .clone()
            .map(|rows| PackedRows::new(rows).unwrap())
    }

    fn layer(&self, groups: &ProcessGroups, comm: ContextComm) -> Result<Attention, ParallelError> {
        let config = self
            .config()
            .with_sequence_parallel(groups.layout().sp)
            .with_dropout(self.dropout)
            .with_recompute(self.again);
        let mut of_layer = AttentionGroups::from(&groups.tp);
        if !self.told {
            of_layer.cp = ContextParallel::new(&groups.cp, comm)?;
        }
        let layer = config.init(of_layer, &autodiff())?;
        Ok(with_gammas(layer, groups.tp.seed()))
    }

    fn told_with_tokens(&self) -> bool {
        self.told
    }

    fn forward(
        layer: &Attention,
        x: Tensor<3>,
        rope: &RopeTable,
        batch: &BatchContext,
    ) -> Tensor<3> {
        layer.forward_in(x, Some(rope), batch)
    }
}

/// Gives the norms random scales, the same on all ranks.
pub(super) fn with_gammas(layer: Attention, seed: u64) -> Attention {
    let start: BTreeMap<_, _> = read_params(&layer).into_iter().collect();
    let value = |path: &str, shape: &[usize]| {
        Ok::<_, Infallible>(if path.ends_with("gamma") {
            normal(shape, seed, path)
        } else {
            start[path].clone()
        })
    };
    load_params(layer, value).unwrap()
}
