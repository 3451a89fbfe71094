//! The time of a micro-batch in the embedding, and in output matrix and loss.

use megaburn_mesh::Axis;

use crate::{
    machine::ProductKind,
    parts::{Parts, Passes},
    rank::Rank,
};

impl Rank<'_> {
    /// The passes of a micro-batch through the embedding.
    pub(crate) fn embedding(&self) -> Passes {
        let stream = self.tokens(false).of_stream * self.sizes().hidden;
        let [sent, sent_backward] = self.sent_by_end_over_tp(true);
        let bandwidth = self.links(&[Axis::Tp]).ring();
        Passes {
            forward: Parts {
                memory: self.machine.memory(2.0 * self.element * stream),
                communication: sent.seconds(bandwidth),
                ..Parts::default()
            },
            weight: Parts {
                // Reads the gradient, and adds its rows to those of the weight in f32.
                memory: self
                    .machine
                    .memory((self.element + 2.0 * self.gradient) * stream),
                communication: sent_backward.seconds(bandwidth),
                ..Parts::default()
            },
            ..Passes::default()
        }
    }

    /// The passes of a micro-batch through the last norm, the output matrix and the loss.
    pub(crate) fn head(&self) -> Passes {
        let tokens = self.tokens(false);
        let hidden = self.sizes().hidden;
        let vocab = self.vocab();
        let n = tokens.on_rank;
        let smallest = n.min(hidden).min(vocab).max(1.0);
        let product = self
            .machine
            .product([n, hidden, vocab], smallest, ProductKind::Plain);
        let norm = 4.0 * self.element * tokens.of_stream * hidden;
        let is_fused = self.config.train.fused_linear_cross_entropy;
        let logits = self.element * n * vocab;
        // Logits are read and written twice in both passes together. The fused loss computes them
        // again, and adds to the main gradient for each chunk, which is as large as the residual
        // stream.
        let chunks = (vocab / hidden).ceil();
        let sums = if is_fused {
            chunks * 2.0 * self.gradient * vocab * hidden
        } else {
            0.0
        };
        let [sent, sent_backward] = self.sent_by_end_over_tp(false);
        let bandwidth = self.links(&[Axis::Tp]).ring();
        let heads = (1 + self.model.mtp_layers) as f64;
        Passes {
            forward: Parts {
                products: heads * product,
                memory: heads * self.machine.memory(norm + 2.0 * logits),
                communication: heads * sent.seconds(bandwidth),
                ..Parts::default()
            },
            input: Parts {
                products: heads * product * if is_fused { 2.0 } else { 1.0 },
                memory: heads * self.machine.memory(norm + 2.0 * logits),
                communication: heads * sent_backward.seconds(bandwidth),
                ..Parts::default()
            },
            weight: Parts {
                products: heads * product,
                memory: heads * self.machine.memory(sums),
                ..Parts::default()
            },
        }
    }
}
