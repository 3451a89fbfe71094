//! Floating-point operations (FLOPs) of a training step by Megatron's formula, so that TFLOP/s are
//! comparable. The formula counts matrix products only, forward and backward, with the causal half
//! of attention and without recompute.
//!
//! The products are:
//! - Attention: its matrices, including those to and from [latents](crate::decoder::Mla), and for
//!   each token half of a sequence's products of queries with keys and of probabilities with
//!   values. The latter are `3 (a + v) s` FLOPs per layer and token, for `a` query features of all
//!   heads, `v` value features and `s` tokens. In both directions they are twice as many.
//! - The square matrix of a masked language model before its output projection. The pooler and the
//!   classifier of its first token are not counted.
//! - Experts: those that a token uses, including the shared one.
//! - Cross attention: its queries and its output for the decoder's positions, its keys and values
//!   for the encoder's, and all pairs of the two. An encoder sees both directions. Megatron's formula
//!   does not know encoders, and its numbers of T5 are those of a decoder.
//! - Multi-token prediction: the projection before each block, with `2 h^2` weights, and the output
//!   projection after it.
//!
//! The router is not counted. Neither are the scales of the norms of latents, which Megatron counts
//! as one column of the matrix before each norm.
//!
//! Source: Megatron-LM `megatron/training/training.py`, `num_floating_point_operations`.

/// The sizes that enter the FLOP formula.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlopShape {
    /// Features of the residual stream.
    pub hidden: usize,
    /// Number of weights in the matrices of a block's attention.
    pub attention: usize,
    /// Query features: heads times head size.
    pub query: usize,
    /// Output features of attention: heads times the size of their values.
    pub values: usize,
    /// Features inside the MLP.
    pub ffn: usize,
    /// Number of matrices of the MLP: 3 if gated, else 2.
    pub ffn_matrices: usize,
    /// Number of blocks, including the blocks of multi-token prediction.
    pub layers: usize,
    /// Number of blocks of multi-token prediction.
    pub mtp_layers: usize,
    /// Number of blocks that have experts in place of the MLP.
    pub expert_layers: usize,
    /// Features inside all the experts of a token in such a block.
    pub expert_ffn: usize,
    /// Number of token ids.
    pub vocab: usize,
    /// Number of blocks, from the first on, that are the encoder of an encoder-decoder model.
    pub encoder_layers: usize,
    /// Whether positions see all others, so that attention has no causal half.
    pub bidirectional: bool,
    /// Whether a square matrix is before the output projection.
    pub masked_head: bool,
}

impl FlopShape {
    /// FLOPs to train on `num_sequences` sequences of `seq_len` tokens, forward and backward.
    pub fn training(&self, num_sequences: usize, seq_len: usize) -> f64 {
        let Self {
            hidden,
            query,
            values,
            ffn,
            ffn_matrices,
            layers,
            mtp_layers,
            vocab,
            ..
        } = *self;
        let features = (layers - self.expert_layers) * ffn + self.expert_layers * self.expert_ffn;
        let blocks = layers * self.attention + ffn_matrices * hidden * features;
        let squares_of_ends = 2 * mtp_layers + usize::from(self.masked_head);
        let ends = hidden * vocab * (1 + mtp_layers) + hidden * hidden * squares_of_ends;
        let tokens = (num_sequences * seq_len) as f64;
        let squares = tokens * seq_len as f64;
        let seen = if self.bidirectional { 6.0 } else { 3.0 };
        let scores = seen * ((query + values) * layers) as f64 * squares;
        6.0 * tokens * (blocks + ends) as f64 + scores
    }

    /// FLOPs to train an encoder-decoder model on `num_sequences` pairs of sequences with these
    /// numbers of tokens, forward and backward.
    pub fn training_pairs(&self, num_sequences: usize, [encoder, decoder]: [usize; 2]) -> f64 {
        let [encoder, decoder] = [encoder, decoder].map(|len| len as f64);
        let [encoder_layers, decoder_layers] =
            [self.encoder_layers, self.layers - self.encoder_layers].map(|layers| layers as f64);
        let block = (self.attention + self.ffn_matrices * self.hidden * self.ffn) as f64;
        let queries = (2 * self.hidden * self.query) as f64;
        let keys = self.attention as f64 - queries;
        let of_encoder = encoder_layers * block + decoder_layers * keys;
        let of_decoder = decoder_layers * (block + queries) + (self.hidden * self.vocab) as f64;
        let products = 6.0 * (encoder * of_encoder + decoder * of_decoder);
        // The causal half of the decoder's own pairs.
        let pairs = encoder_layers * encoder * encoder
            + decoder_layers * (decoder * decoder / 2.0 + decoder * encoder);
        let scores = 6.0 * (self.query + self.values) as f64 * pairs;
        num_sequences as f64 * (products + scores)
    }

    /// FLOPs per token to train on sequences of `seq_len` tokens.
    pub fn training_per_token(&self, seq_len: usize) -> f64 {
        self.training(1, seq_len) / seq_len as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attention(hidden: usize, query: usize, key_value: usize) -> usize {
        hidden * (query + 2 * key_value) + query * hidden
    }

    fn llama3(hidden: usize, ffn: usize, layers: usize) -> FlopShape {
        FlopShape {
            hidden,
            attention: attention(hidden, hidden, 1024),
            query: hidden,
            values: hidden,
            ffn,
            ffn_matrices: 3,
            layers,
            mtp_layers: 0,
            expert_layers: 0,
            expert_ffn: 0,
            vocab: 128256,
            encoder_layers: 0,
            bidirectional: false,
            masked_head: false,
        }
    }

    /// GFLOP per token, derived from the tokens/s and TFLOP/s that NVIDIA publishes.
    #[test]
    fn llama_3_costs_what_is_published() {
        for (shape, published) in [
            (llama3(4096, 14336, 32), 51.47),
            (llama3(8192, 28672, 80), 449.2),
            (llama3(16384, 53248, 126), 2524.0),
        ] {
            let gflop = shape.training_per_token(8192) / 1e9;
            assert!(
                (gflop / published - 1.0).abs() < 5e-4,
                "{gflop} against {published}"
            );
        }
    }

    /// GFLOP per token of mixture-of-experts models at 4096 tokens, derived from NVIDIA's figures
    /// in the same way.
    #[test]
    fn experts_cost_what_a_token_goes_through() {
        let mixtral = FlopShape {
            expert_layers: 32,
            expert_ffn: 2 * 14336,
            vocab: 32000,
            ..llama3(4096, 0, 32)
        };
        let qwen3 = FlopShape {
            attention: attention(2048, 4096, 512),
            query: 4096,
            values: 4096,
            expert_layers: 48,
            expert_ffn: 8 * 768,
            vocab: 151936,
            ..llama3(2048, 6144, 48)
        };
        for (shape, published) in [(mixtral, 79.7), (qwen3, 23.0)] {
            let gflop = shape.training_per_token(4096) / 1e9;
            assert!(
                (gflop / published - 1.0).abs() < 2e-3,
                "{gflop} against {published}"
            );
        }
    }

    #[test]
    fn a_block_that_predicts_further_tokens_costs_itself_its_matrix_and_a_head() {
        let [one, two] = [1, 2].map(|layers| llama3(4096, 14336, layers));
        let mtp = FlopShape {
            mtp_layers: 1,
            ..two
        };
        let found = mtp.training(1, 64) - two.training(1, 64);
        assert_eq!(found, 64.0 * 6.0 * 4096.0 * (128256.0 + 2.0 * 4096.0));
        assert!(two.training(1, 64) > one.training(1, 64));
    }

    #[test]
    fn an_encoder_has_whole_squares_of_scores_and_the_matrix_of_its_head() {
        let decoder = llama3(64, 256, 3);
        let encoder = FlopShape {
            bidirectional: true,
            ..decoder
        };
        let scores = 3.0 * (64.0 + 64.0) * 3.0 * 16.0 * 16.0;
        assert_eq!(encoder.training(1, 16) - decoder.training(1, 16), scores);
        let with_head = FlopShape {
            masked_head: true,
            ..encoder
        };
        let matrix = with_head.training(2, 16) - encoder.training(2, 16);
        assert_eq!(matrix, 6.0 * 32.0 * 64.0 * 64.0);
    }

    #[test]
    fn a_plain_mlp_has_two_matrices() {
        // Megatron's 7B CI case: 43.49 GFLOP per token (hidden 4096, ffn 16384, vocabulary 131200).
        let shape = FlopShape {
            ffn: 16384,
            ffn_matrices: 2,
            vocab: 131200,
            ..llama3(4096, 14336, 32)
        };
        let gflop = shape.training_per_token(8192) / 1e9;
        assert!((gflop / 43.49 - 1.0).abs() < 5e-4, "{gflop}");
    }

    /// A decoder whose encoder reads nothing costs what a decoder does, besides the queries and the
    /// output of its cross attention; and the encoder costs what an encoder without logits does.
    #[test]
    fn an_encoder_and_a_decoder_cost_what_they_do_alone_and_their_cross_attention() {
        let (hidden, query, key_value) = (64, 96, 32);
        let both = FlopShape {
            attention: 2 * hidden * (query + key_value),
            query,
            values: query,
            encoder_layers: 2,
            vocab: 100,
            ..llama3(hidden, 256, 5)
        };
        let decoder = FlopShape {
            layers: 3,
            encoder_layers: 0,
            ..both
        };
        let crossed = (6 * 7 * 3 * 2 * hidden * query) as f64;
        let found = both.training_pairs(4, [0, 7]);
        assert_eq!(found, 4.0 * (decoder.training(1, 7) + crossed));
        let encoder = FlopShape {
            layers: 2,
            encoder_layers: 0,
            bidirectional: true,
            vocab: 0,
            ..both
        };
        let keys = (6 * 9 * 3 * 2 * hidden * key_value) as f64;
        let read = both.training_pairs(1, [9, 0]);
        assert_eq!(read, encoder.training(1, 9) + keys);
        let pairs = both.training_pairs(1, [9, 7]) - both.training_pairs(1, [0, 7]) - read;
        assert_eq!(pairs, (6 * 2 * query * 3 * 9 * 7) as f64);
    }
}
