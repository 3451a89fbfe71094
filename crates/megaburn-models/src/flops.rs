//! Floating-point operations of a training step by Megatron's formula, so that TFLOP/s can be
//! compared: matrix products only, forward and backward, attention's causal half, no recomputation.
//!
//! Of attention these are its matrices, those to and from latents where it has
//! [some](crate::decoder::LatentAttention), and of each token half of a sequence's products of queries with
//! keys and of probabilities with values: `3 (a + v) s` FLOPs a layer and token, for `a` features of all
//! heads' queries, `v` of their values and `s` tokens. Of experts they are those that a token goes to, the
//! shared one included. A block that predicts further tokens has a matrix of `2 h^2` weights before it and the
//! vocabulary's behind it. The router is not counted, nor are the scales of latents' norms, which Megatron
//! counts as a column each of the matrices before them.
//!
//! Source: Megatron-LM `megatron/training/training.py`, `num_floating_point_operations`.

/// The sizes that count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlopShape {
    /// Features of the residual stream.
    pub hidden: usize,
    /// Weights of the matrices of a block's attention.
    pub attention: usize,
    /// Query features: heads times head size.
    pub query: usize,
    /// Features of what attention gives: heads times size of their values.
    pub values: usize,
    /// Features inside the MLP.
    pub ffn: usize,
    /// Matrices of the MLP: 3 gated, 2 plain.
    pub ffn_matrices: usize,
    /// Blocks, those that predict further tokens included.
    pub layers: usize,
    /// Blocks of which predict further tokens.
    pub mtp_layers: usize,
    /// Blocks of which have experts in place of the MLP.
    pub expert_layers: usize,
    /// Features inside all the experts that a token goes to there.
    pub expert_ffn: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
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
        let ends = hidden * vocab * (1 + mtp_layers) + 2 * hidden * hidden * mtp_layers;
        let tokens = (num_sequences * seq_len) as f64;
        let squares = tokens * seq_len as f64;
        let scores = 3.0 * ((query + values) * layers) as f64 * squares;
        6.0 * tokens * (blocks + ends) as f64 + scores
    }

    /// FLOPs a token.
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
        }
    }

    /// GFLOP a token derived from NVIDIA's published pairs of tokens/s and TFLOP/s.
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

    /// The same, derived from NVIDIA's of mixtures of experts, at 4096 tokens.
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
    fn a_plain_mlp_has_two_matrices() {
        // Megatron's 7B CI case: 43.49 GFLOP a token (hidden 4096, ffn 16384, vocabulary 131200).
        let shape = FlopShape {
            ffn: 16384,
            ffn_matrices: 2,
            vocab: 131200,
            ..llama3(4096, 14336, 32)
        };
        let gflop = shape.training_per_token(8192) / 1e9;
        assert!((gflop / 43.49 - 1.0).abs() < 5e-4, "{gflop}");
    }
}
