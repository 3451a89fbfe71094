//! The activation memory of an encoder-decoder model.

use std::{borrow::Cow, ops::Range};

use super::{ActivationMemory, STATISTIC, Scores, StageEnds, terms::Term};
use crate::decoder::Segment;

impl ActivationMemory {
    /// The same model with the sequences that block `index` reads.
    pub(super) fn half_of(&self, index: usize) -> Cow<'_, Self> {
        match self.model.is_encoder_decoder() {
            true => Cow::Owned(self.half(index < self.model.encoder_layers)),
            false => Cow::Borrowed(self),
        }
    }

    /// The same model with the sequences of the encoder, or of the decoder.
    fn half(&self, of_encoder: bool) -> Self {
        let mut half = self.clone();
        if !of_encoder && self.model.is_encoder_decoder() {
            half.seq_len = self.decoder_seq_len;
        }
        half
    }

    /// Bytes that the last norm, the head and the loss save for a micro-batch; multi-token prediction
    /// is not counted. Backward frees them before it reaches any block.
    pub fn loss(&self) -> usize {
        match self.model.is_encoder_decoder() {
            true => self.half(false).last(),
            false => self.last(),
        }
    }

    /// [`Self::stage`] of an encoder-decoder model.
    pub(super) fn stage_of_halves(
        &self,
        blocks: Range<usize>,
        ends: StageEnds,
        in_flight: usize,
    ) -> usize {
        let [encoder, decoder] = [true, false].map(|of_encoder| self.half(of_encoder));
        let held = |Segment { blocks, recomputed }: Segment| {
            if !recomputed {
                return blocks.map(|index| self.layer(index)).sum();
            }
            let half = self.half_of(blocks.start);
            let before = if self.recompute.offload {
                0
            } else {
                half.stream() + half.rows() * half.statistics()
            };
            before + half.kept_attention(blocks.len())
        };
        let last = self.model.encoder_layers;
        // A block that is recomputed recomputes the norm of the encoder too.
        let ends_encoder = self
            .segments(blocks.clone())
            .any(|segment| segment.blocks.end == last && !segment.recomputed);
        let of_norm = if ends_encoder {
            encoder.stream() + encoder.rows() * encoder.statistics()
        } else {
            0
        };
        let memory = if blocks.end > last {
            encoder.stream()
        } else {
            0
        };
        let of_blocks = self.segments(blocks).map(held).sum::<usize>() + of_norm + memory;
        let first = if ends.first {
            encoder.first() + decoder.first()
        } else {
            0
        };
        let loss = if ends.last { decoder.last() } else { 0 };
        let leaving = if self.recompute.offload {
            2 * encoder.stream().max(decoder.stream())
        } else {
            0
        };
        in_flight * (of_blocks + first + loss) + leaving
    }

    /// The terms of cross attention in block `index`; none in blocks without it.
    pub(super) fn of_cross_attention(&self, index: usize) -> Vec<Term> {
        if !self.model.attends_to_encoder(index) {
            return Vec::new();
        }
        let encoder_tokens = self.tokens();
        let decoder = self.half(false);
        let n = decoder.tokens();
        let stream = decoder.stream();
        let normed = stream + decoder.rows() * decoder.statistics();
        let e = self.element;
        let sizes = self.sizes();
        let placement = self.model.norm_placement;
        let inputs = if placement.has_input_norms() { 1 } else { 0 };
        let outputs = if placement.has_output_norms() { 1 } else { 0 };
        let kept = if self.recompute.norm { 0 } else { inputs };
        let composed = self.scores == Scores::Kept && !self.recompute.core_attention;
        let scores = match (composed, self.recompute.core_attention) {
            (true, _) => e * sizes.heads * n * encoder_tokens / self.micro_batch.max(1),
            (false, true) => 0,
            (false, false) => STATISTIC * sizes.heads * n,
        };
        vec![
            ("cross attention: stream and norms", (1 + outputs) * normed),
            ("cross attention: output of the norm", kept * stream),
            (
                "cross attention: queries, keys and values",
                e * (sizes.query * n + 2 * sizes.key_value * encoder_tokens),
            ),
            (
                "cross attention: output",
                (1 + usize::from(composed)) * e * sizes.query * n,
            ),
            ("cross attention: scores", scores),
        ]
    }
}
