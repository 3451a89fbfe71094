//! Multi-token prediction: blocks behind a model's last one that learn to predict tokens further ahead.
//!
//! Source: DeepSeek-AI, "DeepSeek-V3 technical report" (2024), <https://arxiv.org/abs/2412.19437>, section
//! 2.2; Megatron-LM `megatron/core/transformer/multi_token_prediction.py`.

use burn::{
    module::Module,
    nn::Initializer,
    prelude::{Device, Int},
    tensor::Tensor,
};
use megaburn_collective::Group;
use megaburn_mesh::Zigzag;
use megaburn_parallel::{
    ExpertGroups, Norm, ParallelDropout, PlanBuilder, Recomputable, ReplicatedLinear,
    ReplicatedLinearConfig, Residual, Sharded, TokenContext, recomputed,
};

use super::{Block, Decoder, Dropout, MtpTargets, Recompute, Stage, StageLosses, block::norm};
use crate::{DecoderConfig, ModelError};

/// What a block that predicts further tokens has beside the parts of any [`Block`].
///
/// At depth `k` a token's stream is made of what depth `k - 1` ended in, the model itself at depth 0, and of
/// the vector of the token that stands `k` places on; behind the block come a norm of its own and the
/// model's output projection, which is asked for the token after that:
///
/// ```text
/// h'_k[i] = eh_proj([enorm(embedding(t[i + k])) | hnorm(h_(k-1)[i])])
/// h_k     = norm(block(h'_k)),   logits_k = head(h_k),   label t[i + k + 1]
/// ```
///
/// `h_0` is behind the model's last norm. Embedding and output projection are the model's. A token's
/// learned position is in `h` already.
///
/// # Collective
/// That of the embedding, the block and the output projection. The matrix is whole on every rank: with
/// sequence parallelism a rank multiplies its own stretch, and without it all multiply the same.
#[derive(Module, Debug)]
pub struct Mtp {
    /// Of the vectors of tokens.
    pub enorm: Norm,
    /// Of the depth before.
    pub hnorm: Norm,
    /// Both, in this order, to the residual stream, `[2 hidden, hidden]`.
    pub eh_proj: ReplicatedLinear,
    /// Behind the block.
    pub norm: Norm,
    /// Of the vectors of tokens.
    dropout: Option<ParallelDropout>,
}

impl Mtp {
    /// That of block `index`.
    pub(super) fn new(
        config: &DecoderConfig,
        index: usize,
        groups: &ExpertGroups,
        sequence_parallel: bool,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let norm = || norm(config, &groups.tp, sequence_parallel, device);
        let eh_proj = ReplicatedLinearConfig::new(2 * config.hidden, config.hidden)
            .with_sequence_parallel(sequence_parallel)
            .with_initializer(Initializer::Normal {
                mean: 0.0,
                std: 0.02,
            })
            .with_path(Some(format!("blocks.{index}.mtp.eh_proj")))
            .init(&groups.tp, device)?;
        Ok(Self {
            enorm: norm(),
            hnorm: norm(),
            eh_proj,
            norm: norm(),
            dropout: None,
        })
    }

    /// The same part of block `index`, and what training drops of the vectors with which it begins.
    pub(super) fn with_dropout(
        self,
        dropout: Dropout,
        index: usize,
        group: &Group,
        (sequence_parallel, zigzag): (bool, Zigzag),
    ) -> Result<Self, ModelError> {
        let layer = dropout.layer(&format!("blocks.{index}.mtp"), group, sequence_parallel)?;
        Ok(Self {
            dropout: Some(layer.with_context(zigzag)),
            ..self
        })
    }

    /// The same, of what a rank holds of sequences that ranks share.
    pub(super) fn with_context(self, zigzag: Zigzag) -> Self {
        Self {
            dropout: self.dropout.map(|dropout| dropout.with_context(zigzag)),
            ..self
        }
    }

    /// The same, and whether the output projection computes the last norm once more.
    pub(super) fn with_recompute(self, recompute: Recompute) -> Self {
        Self {
            norm: self.norm.with_recompute(recompute.norm),
            ..self
        }
    }

    /// The stream before the block.
    fn joined(&self, vectors: Tensor<3>, before: Tensor<3>, context: &TokenContext) -> Residual {
        let vectors = match (&self.dropout, &context.block) {
            (Some(dropout), Some(block)) => dropout.forward(vectors, block),
            _ => vectors,
        };
        let both = vec![self.enorm.forward(vectors), self.hnorm.forward(before)];
        self.eh_proj.forward(Tensor::cat(both, 2)).into()
    }
}

impl Sharded for Mtp {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("enorm", &self.enorm);
        plan.child("hnorm", &self.hnorm);
        plan.child("eh_proj", &self.eh_proj);
        plan.child("norm", &self.norm);
    }
}

impl Block {
    /// What a depth ends in: of the vectors of its tokens, and of what the depth before ended in.
    ///
    /// # Shapes
    /// `[S, B, H]` all (with sequence parallelism `[S / n, B, H]`)
    fn predict(
        &self,
        vectors: Tensor<3>,
        before: Tensor<3>,
        context: &TokenContext,
    ) -> Recomputable<3> {
        let mtp = self
            .mtp
            .as_ref()
            .expect("the block predicts further tokens");
        let x = self.forward(mtp.joined(vectors, before, context), context);
        x.normed(&mtp.norm).0
    }

    /// The same, of which nothing is kept but those two.
    fn predict_again(
        &self,
        vectors: Tensor<3>,
        before: Tensor<3>,
        context: TokenContext,
    ) -> Recomputable<3> {
        let inputs = [vectors.into(), before.into()];
        let [x] = recomputed(self, inputs, move |block, [vectors, before]| {
            [block.predict(vectors, before, &context).into_tensor()]
        });
        x.into()
    }
}

impl Stage<'_> {
    /// The [`loss`](Self::loss) behind the last stage, and those of the depths of multi-token prediction
    /// that are told what they read: none of them, or all.
    ///
    /// # Shapes
    /// labels, and what each depth has, `[S, B]`; sums are `[1]`, the same on every member
    ///
    /// # Panics
    /// If they are told of another number of depths than the model has.
    pub fn losses(&self, x: Residual, labels: Tensor<2, Int>, ahead: &[MtpTargets]) -> StageLosses {
        let model = self.model;
        let mut before = model.normed(x);
        let main = model.loss_from_normed(before.clone(), labels);
        let mtp_depths = model.mtp_blocks().count();
        assert!(
            ahead.is_empty() || ahead.len() == mtp_depths,
            "of {mtp_depths} depths {}",
            ahead.len()
        );
        let mut mtp = Vec::with_capacity(ahead.len());
        for (
            (block, again),
            MtpTargets {
                tokens,
                labels,
                counted,
            },
        ) in model.mtp_blocks().zip(ahead)
        {
            let len = tokens.dims()[0] * self.zigzag().ranks();
            let context = self.context(len, counted.clone(), &tokens.device());
            let embedding = model
                .embedding
                .as_ref()
                .expect("a stage with a loss has it");
            let vectors = embedding.forward(tokens.clone());
            before = if again {
                model.parts.recompute.with_selective_save(|| {
                    block.predict_again(vectors, before.into_tensor(), context)
                })
            } else {
                block.predict(vectors, before.into_tensor(), &context)
            };
            mtp.push(model.loss_from_normed(before.clone(), labels.clone()));
        }
        StageLosses { main, mtp }
    }
}

impl Decoder {
    /// The blocks that predict further tokens, where the model ends here, and whether backward computes
    /// them once more.
    fn mtp_blocks(&self) -> impl Iterator<Item = (&Block, bool)> {
        let layers = self.config().layers;
        let before = self.blocks_of_last_stage();
        let blocks = self.blocks[layers..].iter().flatten().enumerate();
        blocks.map(move |(depth, block)| (block, self.parts.recompute.is_behind(before + depth)))
    }

    /// The same model, whose blocks that predict further tokens know what backward computes once more.
    pub(super) fn with_mtp_recompute(mut self) -> Self {
        let layers = self.config().layers;
        let before = self.blocks_of_last_stage();
        let recompute = self.parts.recompute;
        for (depth, place) in self.blocks[layers..].iter_mut().enumerate() {
            *place = place.take().map(|block| {
                if recompute.is_behind(before + depth) {
                    block.as_checkpoint_member(false)
                } else {
                    block.with_recompute(recompute)
                }
            });
        }
        self
    }

    fn blocks_of_last_stage(&self) -> usize {
        self.parts
            .stages
            .last()
            .map_or(0, |stage| stage.layers.len())
    }
}
