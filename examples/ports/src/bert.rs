//! BERT as bert-burn of Burn's model zoo has it, with its names, on one device: with token types, and
//! with the heads of pre-training.

use std::{error::Error, path::Path};

use burn::{
    config::Config,
    module::{Module, Param},
    nn::{
        Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
        LinearConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    prelude::{Bool, Device, Int},
    store::{KeyRemapper, ModuleSnapshot, PyTorchToBurnAdapter, SafetensorsStore},
    tensor::{Tensor, activation::gelu},
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
    /// A model with random weights.
    pub fn init(&self, device: &Device) -> Bert {
        let encoder = TransformerEncoderConfig::new(
            self.hidden_size,
            self.intermediate_size,
            self.num_attention_heads,
            self.num_hidden_layers,
        );
        let encoder = encoder
            .with_dropout(self.hidden_dropout_prob)
            .with_layer_norm_eps(self.layer_norm_eps);
        Bert {
            embeddings: Embeddings::new(self, device),
            encoder: encoder.init(device),
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

fn linear(d_input: usize, d_output: usize, device: &Device) -> Linear {
    LinearConfig::new(d_input, d_output).init(device)
}

fn norm(config: &BertConfig, device: &Device) -> LayerNorm {
    LayerNormConfig::new(config.hidden_size)
        .with_epsilon(config.layer_norm_eps)
        .init(device)
}

#[derive(Module, Debug)]
pub struct Bert {
    embeddings: Embeddings,
    encoder: TransformerEncoder,
    pooler: Linear,
    lm_head: LmHead,
    next_sentence: Linear,
}

#[derive(Module, Debug)]
struct Embeddings {
    word_embeddings: Embedding,
    position_embeddings: Embedding,
    token_type_embeddings: Embedding,
    layer_norm: LayerNorm,
    dropout: Dropout,
}

/// The head of masked tokens, which multiplies with the vectors of the tokens.
#[derive(Module, Debug)]
struct LmHead {
    dense: Linear,
    layer_norm: LayerNorm,
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
        let x = self
            .encoder
            .forward(TransformerEncoderInput::new(x).mask_pad(is_padding));
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
        let embedding = |rows| EmbeddingConfig::new(rows, config.hidden_size).init(device);
        Self {
            word_embeddings: embedding(config.vocab_size),
            position_embeddings: embedding(config.max_position_embeddings),
            token_type_embeddings: embedding(config.type_vocab_size),
            layer_norm: norm(config, device),
            dropout: DropoutConfig::new(config.hidden_dropout_prob).init(),
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
    /// Reads a model in Hugging Face's format.
    pub fn load(folder: &Path, device: &Device) -> Result<Self, Box<dyn Error>> {
        let config = BertConfig::load(folder.join("config.json"))?;
        if config.hidden_act != "gelu" {
            return Err(format!(
                "hidden_act `{}` is not known; use `gelu`",
                config.hidden_act
            )
            .into());
        }
        let mut model = config.init(device);
        let mut store = SafetensorsStore::from_file(folder.join("model.safetensors"))
            .with_from_adapter(PyTorchToBurnAdapter)
            .remap(KeyRemapper::from_patterns(NAMES.to_vec())?);
        model.load_from(&mut store)?;
        Ok(model)
    }
}
