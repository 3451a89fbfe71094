//! The models that are measured.

/// A model and a batch. `benches/peer/models.py` defines the same cases under the same names.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) config: &'static str,
    pub(super) data: Data,
    pub(super) micro_batch: usize,
    pub(super) micro_batches: usize,
}

/// The data that a model trains on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Data {
    /// The bytes of a text.
    Text,
    /// Documents of sentences, for models with an encoder.
    Sentences,
}

const GPT2: &str = r#"
[model]
family = "gpt2"
vocab = 50257
hidden = 768
ffn = 3072
layers = 12
heads = 12
kv_heads = 12
[data]
seq_len = 1024
"#;

/// GPT-2's width and depth with Llama's blocks, without biases, learned positions and layer norms;
/// the difference shows what they cost.
const LLAMA: &str = r#"
[model]
family = "llama"
vocab = 50257
hidden = 768
ffn = 2048
layers = 12
heads = 12
kv_heads = 12
[data]
seq_len = 1024
"#;

const QWEN2: &str = r#"
[model]
family = "qwen2"
vocab = 151936
hidden = 896
ffn = 4864
layers = 24
heads = 14
kv_heads = 2
rope_theta = 1e6
[data]
seq_len = 2048
"#;

/// A quarter of the layers of Megatron-LM's
/// `tests/functional_tests/test_cases/gpt/gpt3_7b_*_memory_speed`.
const GPT_7B: &str = r#"
[model]
family = "gpt2"
vocab = 131073
hidden = 4096
ffn = 16384
layers = 8
heads = 32
kv_heads = 8
tied = false
[data]
seq_len = 8192
"#;

const BERT_LARGE: &str = r#"
[model]
family = "bert"
vocab = 30522
hidden = 1024
ffn = 4096
layers = 24
heads = 16
norm_eps = 1e-12
[data]
seq_len = 512
"#;

const BERT_FULL: &str = r#"
[model]
family = "bert"
vocab = 30522
hidden = 1024
ffn = 4096
layers = 24
heads = 16
norm_eps = 1e-12
[data]
seq_len = 512
short_sequence_probability = 0.0
"#;

/// T5 1.1 large.
const T5_LARGE: &str = r#"
[model]
family = "t5"
vocab = 32128
hidden = 1024
ffn = 2816
layers = 48
encoder_layers = 24
heads = 16
norm_eps = 1e-6
tied = false
[data]
seq_len = 512
decoder_seq_len = 128
"#;

pub(super) const CASES: &[Case] = &[
    Case {
        name: "gpt2 16x1",
        config: GPT2,
        data: Data::Text,
        micro_batch: 16,
        micro_batches: 1,
    },
    Case {
        name: "gpt2 1x16",
        config: GPT2,
        data: Data::Text,
        micro_batch: 1,
        micro_batches: 16,
    },
    Case {
        name: "llama 16x1",
        config: LLAMA,
        data: Data::Text,
        micro_batch: 16,
        micro_batches: 1,
    },
    Case {
        name: "llama 1x16",
        config: LLAMA,
        data: Data::Text,
        micro_batch: 1,
        micro_batches: 16,
    },
    Case {
        name: "qwen2 4x1",
        config: QWEN2,
        data: Data::Text,
        micro_batch: 4,
        micro_batches: 1,
    },
    Case {
        name: "qwen2 1x4",
        config: QWEN2,
        data: Data::Text,
        micro_batch: 1,
        micro_batches: 4,
    },
    Case {
        name: "gpt-7b 1x4",
        config: GPT_7B,
        data: Data::Text,
        micro_batch: 1,
        micro_batches: 4,
    },
    Case {
        name: "bert-large 32x1",
        config: BERT_LARGE,
        data: Data::Sentences,
        micro_batch: 32,
        micro_batches: 1,
    },
    Case {
        name: "bert-full 32x1",
        config: BERT_FULL,
        data: Data::Sentences,
        micro_batch: 32,
        micro_batches: 1,
    },
    Case {
        name: "t5-large 32x1",
        config: T5_LARGE,
        data: Data::Sentences,
        micro_batch: 32,
        micro_batches: 1,
    },
];
