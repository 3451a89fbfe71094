//! The losses of multi-token prediction, depth by depth. [`Mtp`](super::Mtp) says how a depth is
//! made from the one before.

use burn::{prelude::Int, tensor::Tensor};
use megaburn_parallel::{BatchContext, Recomputable, Residual, SelectiveSave, recomputed};

use super::{Block, Decoder, MtpTargets, StageLosses, block_inputs::BlockInputs, rotary::Ropes};

impl Block {
    /// The output of a depth, from the embeddings of its tokens and the output of the depth before.
    ///
    /// # Shapes
    /// `[S, B, H]` all (with sequence parallelism `[S / n, B, H]`)
    fn predict(
        &self,
        vectors: Tensor<3>,
        before: Tensor<3>,
        ropes: &Ropes,
        batch: &BatchContext,
    ) -> Recomputable<3> {
        let mtp = self.mtp.as_ref().expect("the block is an MTP block");
        let inputs = BlockInputs {
            ropes,
            bias: None,
            memory: None,
            batch,
        };
        let x = self.forward(mtp.joined(vectors, before, batch), inputs);
        x.normed(&mtp.norm)
    }

    /// [`Self::predict`] as a recomputed function, which saves only its two inputs.
    fn predict_recomputed(
        &self,
        vectors: Tensor<3>,
        before: Tensor<3>,
        ropes: Ropes,
        batch: BatchContext,
    ) -> Recomputable<3> {
        let inputs = [vectors.into(), before.into()];
        let [x] = recomputed(self, inputs, move |block, [vectors, before]| {
            let x = block.predict(vectors, before, &ropes, &batch);
            [x.into_tensor()]
        });
        x.into()
    }
}

impl Decoder {
    /// The [`loss`](Self::loss) after the last stage, and the losses of the depths of multi-token
    /// prediction. `ahead` has the targets of all depths, or is empty if these losses are not
    /// needed.
    ///
    /// # Shapes
    /// labels, and the tensors of each depth, `[S, B]`; sums are `[1]`, equal on every member
    ///
    /// # Panics
    /// If `ahead` is not empty and its length differs from the number of depths.
    pub fn losses(
        &self,
        x: Residual,
        labels: Tensor<2, Int>,
        ahead: &[MtpTargets],
        batch: &BatchContext,
    ) -> StageLosses {
        let mut before = self.final_norm(x);
        let order = batch.sentence_order.clone();
        let binary = self.binary_head.as_ref().zip(order);
        let binary = binary.map(|(head, order)| head.loss(before.clone().into_tensor(), order));
        let main = self.loss_of(before.clone(), labels);
        // A rank without the last stage has none of these blocks.
        let blocks: Vec<&Block> = self.blocks[self.config().layers..]
            .iter()
            .flatten()
            .collect();
        let depths = blocks.len();
        assert!(
            ahead.is_empty() || ahead.len() == depths,
            "the model has {depths} MTP depths, but {} are given",
            ahead.len()
        );
        let recompute = self.parts.options.recompute;
        let num_blocks = self.stages().last().map_or(0, |stage| stage.layers.len());
        let mut mtp = Vec::with_capacity(ahead.len());
        for (depth, (block, targets)) in blocks.into_iter().zip(ahead).enumerate() {
            let batch = BatchContext {
                counted: targets.counted.clone(),
                ..batch.clone()
            };
            let last = before.into_tensor();
            let ropes = self.ropes(self.num_tokens(&last), &batch, &last.device().inner());
            let vectors = self.embed_tokens(targets.tokens.clone());
            before = if recompute.recomputes_mtp(num_blocks + depth) {
                let saved = recompute.selective_save(&vectors.device());
                let batch = BatchContext {
                    saved_attention: saved.clone(),
                    ..batch
                };
                let x = block.predict_recomputed(vectors, last, ropes, batch);
                saved.iter().for_each(SelectiveSave::end_forward);
                x
            } else {
                block.predict(vectors, last, &ropes, &batch)
            };
            mtp.push(self.loss_of(before.clone(), targets.labels.clone()));
        }
        StageLosses { main, mtp, binary }
    }
}
