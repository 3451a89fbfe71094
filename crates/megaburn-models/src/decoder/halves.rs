//! Which blocks are the encoder and which the decoder of an encoder-decoder model.

use std::ops::Range;

use megaburn_mesh::Layout;
use megaburn_pipeline::StageLayers;

use super::DecoderConfig;
use crate::error::ModelError;

/// The path of the token embedding.
const EMBEDDING: &str = "embedding.weight";
/// The path of the relative bias of blocks that see later positions.
const ENCODER_BIAS: &str = "encoder_bias.weight";
/// The path of the relative bias of causal blocks.
const DECODER_BIAS: &str = "decoder_bias.weight";

impl DecoderConfig {
    /// Whether the model has an encoder, and a decoder that attends to its output.
    pub fn is_encoder_decoder(&self) -> bool {
        self.encoder_layers > 0
    }

    /// Whether block `index` sees later positions.
    pub fn sees_later(&self, index: usize) -> bool {
        self.bidirectional || index < self.encoder_layers
    }

    /// Whether block `index` attends to the output of an encoder.
    pub fn attends_to_encoder(&self, index: usize) -> bool {
        self.is_encoder_decoder() && index >= self.encoder_layers
    }

    /// Whether block `index` is the last one of an encoder whose output the decoder reads.
    pub(super) fn ends_encoder(&self, index: usize) -> bool {
        index + 1 == self.encoder_layers
    }

    /// The blocks of a stage that are the encoder's, and the others.
    pub(super) fn halves(&self, stage: &Range<usize>) -> [Range<usize>; 2] {
        let cut = self.encoder_layers.clamp(stage.start, stage.end);
        [stage.start..cut, cut..stage.end]
    }

    /// How many of the blocks of a stage are the encoder's.
    pub(crate) fn encoder_blocks(&self, stage: &Range<usize>) -> usize {
        self.halves(stage)[0].len()
    }

    /// Whether one of these stages has blocks that use the relative bias of the encoder, or of the
    /// decoder.
    pub(super) fn uses_bias(&self, stages: &[StageLayers], of_encoder: bool) -> bool {
        let uses = |index| self.sees_later(index) == of_encoder;
        self.positions.relative().is_some()
            && stages.iter().any(|stage| stage.layers.clone().any(uses))
    }

    /// The first block that uses the relative bias of the encoder, or of the decoder. The stage that
    /// has it owns the table.
    pub(super) fn owner_of_bias(&self, of_encoder: bool) -> usize {
        if of_encoder { 0 } else { self.encoder_layers }
    }

    /// The paths of the parameters that a stage uses and that another stage may use too, in the
    /// same order for all stages: the embedding if it is tied, or if multi-token prediction reads it
    /// in the last stage, and the relative biases.
    pub fn shared_params(&self, stage: &StageLayers) -> Vec<&'static str> {
        let reads_again = self.tied || self.mtp_layers > 0;
        let own = std::slice::from_ref(stage);
        let uses = [
            (EMBEDDING, reads_again && (stage.embedding || stage.loss)),
            (ENCODER_BIAS, self.uses_bias(own, true)),
            (DECODER_BIAS, self.uses_bias(own, false)),
        ];
        let used = uses.into_iter().filter(|(_, is_used)| *is_used);
        used.map(|(path, _)| path).collect()
    }

    /// The longest text that the model can read; `None` if its positions have no limit.
    pub fn longest_text(&self) -> Option<usize> {
        let has_limit = self.positions.relative().is_none();
        has_limit.then_some(self.max_seq_len)
    }

    /// Checks whether a layout can split an encoder-decoder model, for rows with these numbers of
    /// positions of the encoder and of the decoder, including padding. The split of the layers into
    /// pipeline stages is not checked.
    ///
    /// # Errors
    /// The layout does not fit, or positions exceed the model's limit; the message has all the numbers.
    pub fn check_halves(
        &self,
        layout: &Layout,
        [encoder, decoder]: [usize; 2],
    ) -> Result<(), ModelError> {
        for len in [encoder, decoder] {
            self.check_seq_len(len)?;
            self.check_layout(layout, len)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::Family;

    fn stage(embedding: bool, layers: Range<usize>, loss: bool) -> StageLayers {
        StageLayers {
            embedding,
            layers,
            loss,
        }
    }

    #[test]
    fn a_stage_shares_what_its_blocks_use() {
        let t5 = DecoderConfig {
            layers: 5,
            encoder_layers: 3,
            tied: true,
            ..Family::T5.template()
        };
        let of = |stage: StageLayers| t5.shared_params(&stage);
        assert_eq!(of(stage(true, 0..2, false)), [EMBEDDING, ENCODER_BIAS]);
        assert_eq!(of(stage(false, 2..4, false)), [ENCODER_BIAS, DECODER_BIAS]);
        assert_eq!(of(stage(false, 4..5, true)), [EMBEDDING, DECODER_BIAS]);
        assert_eq!(of(stage(false, 3..3, false)), [""; 0]);
        let llama = Family::LLAMA.template();
        assert_eq!(llama.shared_params(&stage(true, 0..4, false)), [""; 0]);
        assert_eq!(t5.halves(&(2..4)), [2..3, 3..4]);
        assert_eq!(t5.halves(&(0..2)), [0..2, 2..2]);
        assert_eq!(t5.halves(&(4..5)), [4..4, 4..5]);
    }
}
