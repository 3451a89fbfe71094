//! The same BERT on several ranks. A test counts the lines that differ from `bert.rs`.

use std::{error::Error, path::Path};

use burn::{
    config::Config,
    module::{Module, Param},
    nn::{
        Dropout, DropoutConfig, EmbeddingConfig, LayerNorm, LayerNormConfig, LinearConfig,
        attention::MultiHeadAttentionConfig,
    },
    prelude::{Bool, Device, Int},
    store::{KeyRemapper, SafetensorsStore},
    tensor::{Tensor, activation::gelu},
};
use megaburn::{
    parallel::{ParallelMhaInput, ParallelMultiHeadAttention, ReplicatedDropout},
    prelude::*,
    records::{Layout, load_from},
};

/// The sizes of a model, with the names of Hugging Face's `config.json`.
#[derive(Config, Debug)]
pub struct BertConfig {
    pub vocab_size: usize,
    pub type_vocab_size: usize,
    pub max_position_embeddings: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub hidden_dropout_prob: f64,
    pub layer_norm_eps: f64,
    pub hidden_act: String,
}

impl BertConfig {
    /// Which layers are split, and by what.
    fn plan(&self) -> ParallelPlan {
        ParallelPlan::new()
            .attention("encoder.layers.*.mha", self.num_attention_heads)
            .column("encoder.layers.*.pwff.linear_inner")
            .row("encoder.layers.*.pwff.linear_outer")
    }

    /// A model with random weights, which is not split.
    pub fn init(&self, device: &Device) -> Bert {
        let layers = (0..self.num_hidden_layers).map(|_| Layer::new(self, device));
        Bert {
            embeddings: Embeddings::new(self, device),
            encoder: TransformerEncoder {
                layers: layers.collect(),
            },
            pooler: linear(self.hidden_size, self.hidden_size, device),
            lm_head: LmHead {
                dense: linear(self.hidden_size, self.hidden_size, device),
                layer_norm: norm(self, device),
                bias: Param::from_tensor(Tensor::zeros([self.vocab_size], device)),
            },
            next_sentence: linear(self.hidden_size, 2, device),
        }
    }
}

fn linear(d_input: usize, d_output: usize, device: &Device) -> ParallelLinear {
    LinearConfig::new(d_input, d_output).init(device).into()
}

fn norm(config: &BertConfig, device: &Device) -> LayerNorm {
    LayerNormConfig::new(config.hidden_size)
        .with_epsilon(config.layer_norm_eps)
        .init(device)
}

#[derive(Module, Sharded, Debug)]
pub struct Bert {
    embeddings: Embeddings,
    encoder: TransformerEncoder,
    pooler: ParallelLinear,
    lm_head: LmHead,
    next_sentence: ParallelLinear,
}

#[derive(Module, Sharded, Debug)]
struct Embeddings {
    word_embeddings: VocabParallelEmbedding,
    position_embeddings: VocabParallelEmbedding,
    token_type_embeddings: VocabParallelEmbedding,
    #[sharded(replicated)]
    layer_norm: LayerNorm,
    dropout: ReplicatedDropout,
}

/// Burn's `TransformerEncoder` with layers that can be split, and with its names.
#[derive(Module, Sharded, Debug)]
struct TransformerEncoder {
    layers: Vec<Layer>,
}

#[derive(Module, Sharded, Debug)]
struct Layer {
    mha: ParallelMultiHeadAttention,
    pwff: FeedForward,
    #[sharded(replicated)]
    norm_1: LayerNorm,
    #[sharded(replicated)]
    norm_2: LayerNorm,
    dropout: ReplicatedDropout,
}

#[derive(Module, Sharded, Debug)]
struct FeedForward {
    linear_inner: ParallelLinear,
    linear_outer: ParallelLinear,
    #[sharded(skip)]
    dropout: Dropout,
}

/// The head of masked tokens, which multiplies with the vectors of the tokens.
#[derive(Module, Sharded, Debug)]
struct LmHead {
    dense: ParallelLinear,
    #[sharded(replicated)]
    layer_norm: LayerNorm,
    #[sharded(replicated)]
    bias: Param<Tensor<1>>,
}

impl Bert {
    /// `[batch, seq]` tokens, their types, and which of them are padding, to `[batch, seq, vocabulary]`
    /// logits of tokens and `[batch, 2]` logits of the order of two sentences.
    pub fn forward(
        &self,
        tokens: Tensor<2, Int>,
        types: Tensor<2, Int>,
        is_padding: Tensor<2, Bool>,
    ) -> (Tensor<3>, Tensor<2>) {
        let x = self.embeddings.forward(tokens, types);
        let x = self.encoder.forward(x, &is_padding);
        let first = x.clone().narrow(1, 0, 1).squeeze_dim(1);
        let order = self
            .next_sentence
            .forward(self.pooler.forward(first).tanh());
        let x = self
            .lm_head
            .layer_norm
            .forward(gelu(self.lm_head.dense.forward(x)));
        let vectors = self.embeddings.word_embeddings.weight.val().transpose();
        let logits = x.matmul(vectors.unsqueeze()) + self.lm_head.bias.val().unsqueeze();
        (logits, order)
    }
}

impl Embeddings {
    fn new(config: &BertConfig, device: &Device) -> Self {
        let embedding = |rows| {
            EmbeddingConfig::new(rows, config.hidden_size)
                .init(device)
                .into()
        };
        Self {
            word_embeddings: embedding(config.vocab_size),
            position_embeddings: embedding(config.max_position_embeddings),
            token_type_embeddings: embedding(config.type_vocab_size),
            layer_norm: norm(config, device),
            dropout: DropoutConfig::new(config.hidden_dropout_prob).init().into(),
        }
    }

    fn forward(&self, tokens: Tensor<2, Int>, types: Tensor<2, Int>) -> Tensor<3> {
        let positions = Tensor::<1, Int>::arange(0..tokens.dims()[1] as i64, &tokens.device());
        let x = self.word_embeddings.forward(tokens)
            + self.token_type_embeddings.forward(types)
            + self.position_embeddings.forward(positions.unsqueeze());
        self.dropout.forward(self.layer_norm.forward(x))
    }
}

impl TransformerEncoder {
    fn forward(&self, mut x: Tensor<3>, is_padding: &Tensor<2, Bool>) -> Tensor<3> {
        for layer in &self.layers {
            x = layer.forward(x, is_padding);
        }
        x
    }
}

impl Layer {
    fn new(config: &BertConfig, device: &Device) -> Self {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let mha = MultiHeadAttentionConfig::new(hidden, config.num_attention_heads);
        let dropout = DropoutConfig::new(config.hidden_dropout_prob).init();
        Self {
            mha: mha
                .with_dropout(config.hidden_dropout_prob)
                .init(device)
                .into(),
            pwff: FeedForward {
                linear_inner: linear(hidden, inner, device),
                linear_outer: linear(inner, hidden, device),
                dropout: dropout.clone(),
            },
            norm_1: norm(config, device),
            norm_2: norm(config, device),
            dropout: dropout.into(),
        }
    }

    fn forward(&self, x: Tensor<3>, is_padding: &Tensor<2, Bool>) -> Tensor<3> {
        let input = ParallelMhaInput::self_attn(x.clone()).mask_pad(is_padding.clone());
        let x = self
            .norm_1
            .forward(x + self.dropout.forward(self.mha.forward(input).context));
        self.norm_2
            .forward(x.clone() + self.dropout.forward(self.pwff.forward(x)))
    }
}

impl FeedForward {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.dropout.forward(gelu(self.linear_inner.forward(x)));
        self.linear_outer.forward(x)
    }
}

/// Names of Hugging Face's files, and those of the modules above.
const NAMES: [(&str, &str); 15] = [
    // Older files have Burn's names.
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    (r"^bert\.", ""),
    (r"^embeddings\.LayerNorm\.", "embeddings.layer_norm."),
    (r"^pooler\.dense\.", "pooler."),
    (r"^encoder\.layer\.", "encoder.layers."),
    (r"\.attention\.self\.(query|key|value)\.", ".mha.$1."),
    (r"\.attention\.output\.dense\.", ".mha.output."),
    (r"\.attention\.output\.LayerNorm\.", ".norm_1."),
    (r"\.intermediate\.dense\.", ".pwff.linear_inner."),
    (r"^(encoder.*)\.output\.dense\.", "$1.pwff.linear_outer."),
    (r"^(encoder.*)\.output\.LayerNorm\.", "$1.norm_2."),
    (
        r"^cls\.predictions\.transform\.LayerNorm\.",
        "lm_head.layer_norm.",
    ),
    (r"^cls\.predictions\.(transform\.)?", "lm_head."),
    (r"^cls\.seq_relationship\.", "next_sentence."),
];

impl Bert {
    /// Reads this rank's shards of a model in Hugging Face's format.
    pub fn load(folder: &Path, device: &Device, group: &Group) -> Result<Self, Box<dyn Error>> {
        let config = BertConfig::load(folder.join("config.json"))?;
        if config.hidden_act != "gelu" {
            return Err(format!(
                "hidden_act `{}` is not known; use `gelu`",
                config.hidden_act
            )
            .into());
        }
        let model = parallelize(config.init(device), &config.plan(), group)?;
        let mut store = SafetensorsStore::from_file(folder.join("model.safetensors"))
            .remap(KeyRemapper::from_patterns(NAMES.to_vec())?);
        Ok(load_from(model, &mut store, Layout::Torch)?)
    }
}
