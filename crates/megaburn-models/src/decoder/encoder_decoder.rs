//! The forward pass of an encoder-decoder model.
//!
//! Its residual stream holds the positions of the encoder, then those of the decoder, so that all
//! pipeline stages send tensors of one shape. Each stage cuts it in two, and joins the halves again.
//!
//! Source: Vaswani et al. (2017); Raffel et al. (2020) for T5; Megatron-LM
//! `megatron/core/models/T5/t5_model.py`, whose stages have either encoder or decoder blocks.

use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn_parallel::{BatchContext, EncoderRows, Residual};

use super::{Decoder, DecoderCache};

impl Decoder {
    /// The embeddings of the encoder's tokens, followed by those of the decoder's.
    ///
    /// # Shapes
    /// tokens `[S_enc + S_dec, B]`, output `[S_enc + S_dec, B, H]` (with sequence parallelism
    /// `[S_enc / n + S_dec / n, B, H]`)
    pub(super) fn embed_halves(&self, tokens: Tensor<2, Int>, batch: &BatchContext) -> Tensor<3> {
        let len = encoder_rows(batch).len;
        let rest = tokens.dims()[0] - len;
        let encoder = self.embed_with_positions(tokens.clone().narrow(0, 0, len), batch);
        let decoder = self.embed_with_positions(tokens.narrow(0, len, rest), batch);
        let encoder = self.dropout.forward(encoder, batch.block);
        let decoder = self.decoder_dropout.forward(decoder, batch.block);
        Tensor::cat(vec![encoder, decoder], 0)
    }

    /// The encoder's blocks of a stage, then its decoder's blocks, which attend to the encoder's
    /// output.
    ///
    /// # Shapes
    /// `[S_enc + S_dec, B, H]`, unchanged (with sequence parallelism `[S_enc / n + S_dec / n, B,
    /// H]`); after the last stage the decoder's positions only
    pub(super) fn forward_halves(
        &self,
        chunk: usize,
        x: Tensor<3>,
        batch: &BatchContext,
    ) -> Residual {
        let stage = &self.parts.stages[chunk];
        let [of_encoder, of_decoder] = self.config().halves(&stage.layers);
        let [encoder, decoder] = self.cut(x, encoder_rows(batch));
        let own = encoder_context(batch);
        let encoder = self
            .forward_blocks(chunk, of_encoder, encoder, None, &own)
            .sum();
        let memory = Some(encoder.clone());
        let decoder = self.forward_blocks(chunk, of_decoder, decoder, memory, batch);
        if stage.loss {
            return decoder;
        }
        Tensor::cat(vec![encoder, decoder.sum()], 0).into()
    }

    /// Reads the prompt of a sequence, given as `(sequence, tokens)`: returns the encoder's stream
    /// after stage `chunk` of this rank, from `x`, the output of the stage before, or on the first
    /// stage from the tokens. The blocks of the decoder keep the keys and values of its output. The
    /// model must be [prepared for generation](Self::for_generation).
    ///
    /// # Shapes
    /// `[S_enc, 1, H]`
    pub fn read_prompt(
        &self,
        chunk: usize,
        x: Option<Tensor<3>>,
        (sequence, tokens): (usize, &[u32]),
        cache: &mut DecoderCache,
        device: &Device,
    ) -> Tensor<3> {
        let batch = BatchContext::default();
        let x = x.unwrap_or_else(|| {
            let ids: Vec<i64> = tokens.iter().map(|&id| i64::from(id)).collect();
            let ids = TensorData::new(ids, [tokens.len(), 1]);
            self.embed_with_positions(Tensor::from_data(ids, device), &batch)
        });
        let stage = &self.parts.stages[chunk];
        let [of_encoder, of_decoder] = self.config().halves(&stage.layers);
        let x = self
            .forward_blocks(chunk, of_encoder, x, None, &batch)
            .sum();
        let layers = &mut cache.layers[of_decoder.clone()];
        for (block, layer) in self.blocks_at(of_decoder).zip(layers) {
            if let Some(cross) = &block.cross_attention {
                layer.memory.put(sequence, cross.keys_values(x.clone()));
            }
        }
        x
    }

    /// This rank's positions of the encoder, and those of the decoder.
    fn cut(&self, x: Tensor<3>, rows: &EncoderRows) -> [Tensor<3>; 2] {
        let len = rows.len / self.shards();
        let rest = x.dims()[0] - len;
        [x.clone().narrow(0, 0, len), x.narrow(0, len, rest)]
    }
}

/// The encoder's rows of a batch.
fn encoder_rows(batch: &BatchContext) -> &EncoderRows {
    let rows = batch.encoder.as_ref();
    rows.expect("an encoder-decoder model is given `BatchContext::encoder`")
}

/// The batch as the encoder sees it: the padding at the end of a row is a sequence of its own, which
/// the tokens do not attend to.
fn encoder_context(batch: &BatchContext) -> BatchContext {
    BatchContext {
        documents: encoder_rows(batch).documents(),
        ..batch.clone()
    }
}
