//! The same Llama on several ranks. A test counts the lines that differ from `llama.rs`.

use std::{error::Error, path::Path};

use burn::{
    config::Config,
    module::{Module, Param},
    nn::{
        EmbeddingConfig, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig,
    },
    prelude::{Bool, Device, Int},
    store::{KeyRemapper, SafetensorsStore},
    tensor::{
        Tensor,
        activation::{silu, softmax},
    },
};
use megaburn::{
    prelude::*,
    records::{Layout, load_from},
};

/// The sizes of a model, with the names of Hugging Face's `config.json`.
#[derive(Config, Debug)]
pub struct LlamaConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: Option<usize>,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f64,
    /// Where older files have the base of the frequencies.
    pub rope_theta: Option<f32>,
    pub rope_scaling: Option<RopeConfig>,
    pub rope_parameters: Option<RopeConfig>,
}

/// The rotary positions of a model.
#[derive(Config, Debug)]
pub struct RopeConfig {
    pub rope_theta: Option<f32>,
    pub rope_type: Option<String>,
}

impl LlamaConfig {
    fn rope_theta(&self) -> f32 {
        let of_rope = self
            .rope_parameters
            .as_ref()
            .and_then(|rope| rope.rope_theta);
        of_rope.or(self.rope_theta).unwrap_or(10_000.0)
    }

    /// Refuses frequencies that are scaled.
    fn check(&self) -> Result<(), Box<dyn Error>> {
        let ropes = [&self.rope_parameters, &self.rope_scaling];
        for rope_type in ropes
            .into_iter()
            .flatten()
            .filter_map(|rope| rope.rope_type.as_ref())
        {
            if rope_type != "default" {
                return Err(format!("rope_type `{rope_type}` is not known; use `default`").into());
            }
        }
        Ok(())
    }

    fn head_dim(&self) -> usize {
        let even = self.hidden_size / self.num_attention_heads;
        self.head_dim.unwrap_or(even)
    }

    /// Which layers are split, and by what.
    fn plan(&self) -> ParallelPlan {
        ParallelPlan::new()
            .vocabulary("tok_embeddings")
            .column("layers.*.attention.wq")
            .heads(self.num_attention_heads)
            .column("layers.*.attention.{wk,wv}")
            .shared_heads(self.num_key_value_heads)
            .row("layers.*.attention.wo")
            .heads(self.num_attention_heads)
            .column("layers.*.feed_forward.swiglu.{linear_inner,linear_outer}")
            .row("layers.*.feed_forward.w2")
            .column_gathered("output")
    }

    /// A model with random weights, which is not split.
    pub fn init(&self, device: &Device) -> Llama {
        let layers = (0..self.num_hidden_layers).map(|_| Block::new(self, device));
        let rope = RotaryEncodingConfig::new(self.max_position_embeddings, self.head_dim())
            .with_theta(self.rope_theta());
        Llama {
            tok_embeddings: EmbeddingConfig::new(self.vocab_size, self.hidden_size)
                .init(device)
                .into(),
            layers: layers.collect(),
            norm: norm(self, device),
            output: linear(self.hidden_size, self.vocab_size, device),
            rope: rope.init(device),
        }
    }
}

fn linear(d_input: usize, d_output: usize, device: &Device) -> ParallelLinear {
    LinearConfig::new(d_input, d_output)
        .with_bias(false)
        .init(device)
        .into()
}

fn norm(config: &LlamaConfig, device: &Device) -> RmsNorm {
    RmsNormConfig::new(config.hidden_size)
        .with_epsilon(config.rms_norm_eps)
        .init(device)
}

#[derive(Module, Sharded, Debug)]
pub struct Llama {
    tok_embeddings: VocabParallelEmbedding,
    layers: Vec<Block>,
    #[sharded(replicated)]
    norm: RmsNorm,
    output: ParallelLinear,
    #[sharded(skip)]
    rope: RotaryEncoding,
}

#[derive(Module, Sharded, Debug)]
struct Block {
    attention: Attention,
    feed_forward: FeedForward,
    #[sharded(replicated)]
    attention_norm: RmsNorm,
    #[sharded(replicated)]
    ffn_norm: RmsNorm,
}

#[derive(Module, Sharded, Debug)]
struct Attention {
    wq: ParallelLinear,
    wk: ParallelLinear,
    wv: ParallelLinear,
    wo: ParallelLinear,
    head_dim: usize,
}

#[derive(Module, Sharded, Debug)]
struct FeedForward {
    swiglu: SwiGlu,
    w2: ParallelLinear,
}

/// Burn's `SwiGlu` with layers that can be split, and with its names.
#[derive(Module, Sharded, Debug)]
struct SwiGlu {
    linear_inner: ParallelLinear,
    linear_outer: ParallelLinear,
}

impl Llama {
    /// `[batch, seq]` tokens to `[batch, seq, vocabulary]` logits.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let mut x = self.tok_embeddings.forward(tokens);
        for layer in &self.layers {
            x = layer.forward(x, &self.rope);
        }
        self.output.forward(self.norm.forward(x))
    }
}

impl Block {
    fn new(config: &LlamaConfig, device: &Device) -> Self {
        Self {
            attention: Attention::new(config, device),
            feed_forward: FeedForward::new(config, device),
            attention_norm: norm(config, device),
            ffn_norm: norm(config, device),
        }
    }

    fn forward(&self, x: Tensor<3>, rope: &RotaryEncoding) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(self.attention_norm.forward(x), rope);
        x.clone() + self.feed_forward.forward(self.ffn_norm.forward(x))
    }
}

impl Attention {
    fn new(config: &LlamaConfig, device: &Device) -> Self {
        let (n_heads, n_kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let head_dim = config.head_dim();
        Self {
            wq: linear(config.hidden_size, n_heads * head_dim, device),
            wk: linear(config.hidden_size, n_kv_heads * head_dim, device),
            wv: linear(config.hidden_size, n_kv_heads * head_dim, device),
            wo: linear(n_heads * head_dim, config.hidden_size, device),
            head_dim,
        }
    }

    fn forward(&self, x: Tensor<3>, rope: &RotaryEncoding) -> Tensor<3> {
        let query = rope.forward(heads(self.wq.forward(x.clone()), self.head_dim));
        let key = rope.forward(heads(self.wk.forward(x.clone()), self.head_dim));
        let value = heads(self.wv.forward(x), self.head_dim);
        let groups = query.dims()[1] / key.dims()[1];
        let (key, value) = (repeated(key, groups), repeated(value, groups));

        let scores = query
            .matmul(key.transpose())
            .div_scalar((self.head_dim as f32).sqrt());
        let [batch, n_heads, seq, _] = scores.dims();
        let future = Tensor::<2, Bool>::tril_mask([seq, seq], 0, &scores.device());
        let scores = scores.mask_fill(future.unsqueeze(), f32::NEG_INFINITY);
        let context = softmax(scores, 3).matmul(value).swap_dims(1, 2);
        self.wo
            .forward(context.reshape([batch, seq, n_heads * self.head_dim]))
    }
}

/// `[batch, seq, heads * head_dim]` to `[batch, heads, seq, head_dim]`, of this rank's heads.
fn heads(x: Tensor<3>, head_dim: usize) -> Tensor<4> {
    let [batch, seq, width] = x.dims();
    x.reshape([batch, seq, width / head_dim, head_dim])
        .swap_dims(1, 2)
}

/// Each head of `[batch, heads, seq, head_dim]` several times, one for each query head of its group.
fn repeated(x: Tensor<4>, times: usize) -> Tensor<4> {
    let [batch, heads, seq, head_dim] = x.dims();
    let x = x.unsqueeze_dim::<5>(2).repeat_dim(2, times);
    x.reshape([batch, heads * times, seq, head_dim])
}

impl FeedForward {
    fn new(config: &LlamaConfig, device: &Device) -> Self {
        Self {
            swiglu: SwiGlu {
                linear_inner: linear(config.hidden_size, config.intermediate_size, device),
                linear_outer: linear(config.hidden_size, config.intermediate_size, device),
            },
            w2: linear(config.intermediate_size, config.hidden_size, device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.w2.forward(self.swiglu.forward(x))
    }
}

impl SwiGlu {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        silu(self.linear_inner.forward(x.clone())) * self.linear_outer.forward(x)
    }
}

/// Names of Hugging Face's files, and those of the modules above.
const NAMES: [(&str, &str); 9] = [
    (r"^model\.", ""),
    (r"^lm_head\.", "output."),
    (r"^embed_tokens\.", "tok_embeddings."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.([qkvo])_proj\.", ".attention.w$1."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.swiglu.linear_inner."),
    (r"\.mlp\.up_proj\.", ".feed_forward.swiglu.linear_outer."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
];

impl Llama {
    /// Reads this rank's shards of a model in Hugging Face's format.
    pub fn load(folder: &Path, device: &Device, group: &Group) -> Result<Self, Box<dyn Error>> {
        let config = LlamaConfig::load(folder.join("config.json"))?;
        config.check()?;
        let model = parallelize(config.init(device), &config.plan(), group)?;
        let mut store = SafetensorsStore::from_file(folder.join("model.safetensors"))
            .remap(KeyRemapper::from_patterns(NAMES.to_vec())?);
        let mut model = load_from(model, &mut store, Layout::Torch)?;
        for layer in &mut model.layers {
            let Attention {
                wq, wk, head_dim, ..
            } = &mut layer.attention;
            wq.weight = neighbours(wq.weight.clone(), *head_dim);
            wk.weight = neighbours(wk.weight.clone(), *head_dim);
        }
        Ok(model)
    }
}

/// Reorders the columns of each head. Transformers rotates column `i` with column `i + head_dim / 2`,
/// and Burn's `RotaryEncoding` column `2 i` with column `2 i + 1`.
fn neighbours(weight: Param<Tensor<2>>, head_dim: usize) -> Param<Tensor<2>> {
    weight.map(|weight| {
        let [rows, columns] = weight.dims();
        let halves = weight.reshape([rows, columns / head_dim, 2, head_dim / 2]);
        let neighbours = halves.swap_dims(2, 3).reshape([rows, columns]);
        // The parameter is a leaf again.
        neighbours.detach().require_grad()
    })
}
