//! The same Llama as a Burn user would write it: Burn's modules on `[batch, seq, hidden]`, Burn's
//! AdamW, and automatic differentiation throughout.

use std::{collections::BTreeMap, fmt, ops::Range};

use burn::{
    grad_clipping::GradientClippingConfig,
    module::{Module, Param},
    nn::{
        Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig,
        loss::{CrossEntropyLoss, CrossEntropyLossConfig},
    },
    optim::{AdamWConfig, GradientsParams, ModuleOptimizer},
    prelude::{Bool, Device, Int},
    tensor::{Tensor, TensorData, activation, module},
};
use megaburn::{
    models::{Decoder, DecoderConfig},
    parallel::read_params,
};

use crate::llama::{Clip, LEARNING_RATE};

/// A model of one process, with everything that a training step needs.
pub struct PlainBurn {
    /// `None` only while the optimizer updates the model.
    model: Option<PlainLlama>,
    optimizer: ModuleOptimizer,
    tokens: Tensor<2, Int>,
    labels: Tensor<2, Int>,
}

impl PlainBurn {
    /// Creates a model with the weights of `from`, for tokens and labels `[seq, batch]`.
    pub fn new(from: &Decoder, [tokens, labels]: [Tensor<2, Int>; 2], clip: Clip) -> Self {
        let device = Device::flex().autodiff();
        let [tokens, labels] = [tokens, labels].map(|x| Tensor::from_inner(x.transpose()));
        let model = PlainLlama::new(from, tokens.dims()[1], &device);
        let mut optimizer = AdamWConfig::new().with_beta_2(0.95).with_epsilon(1e-8);
        optimizer = optimizer.with_weight_decay(0.1);
        if clip == Clip::ToOne {
            optimizer = optimizer.with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)));
        }
        Self {
            model: Some(model),
            optimizer: optimizer.init(),
            tokens,
            labels,
        }
    }

    /// The mean loss in nats, without automatic differentiation.
    pub fn forward(&self) -> f32 {
        let model = self
            .model
            .as_ref()
            .expect("the model is absent only during an update");
        let [tokens, labels] = [&self.tokens, &self.labels].map(|x| x.clone().inner());
        model.valid().loss(tokens, labels).into_scalar()
    }

    /// Runs one training step.
    pub fn step(&mut self) {
        let model = self
            .model
            .take()
            .expect("the model is absent only during an update");
        let grads = model
            .loss(self.tokens.clone(), self.labels.clone())
            .backward();
        let grads = GradientsParams::from_grads(grads, &model);
        self.model = Some(self.optimizer.step(LEARNING_RATE, model, grads));
    }
}

impl fmt::Debug for PlainBurn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlainBurn")
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

#[derive(Module, Debug)]
struct PlainLlama {
    embedding: Embedding,
    blocks: Vec<PlainBlock>,
    norm: RmsNorm,
    loss: CrossEntropyLoss,
    rope: Rope,
}

/// The rotary tables `[seq, head_dim]`, and the causal mask `[seq, seq]`, which is true where a
/// query must not see a key.
#[derive(Module, Debug)]
struct Rope {
    cos: Tensor<2>,
    sin: Tensor<2>,
    future: Tensor<2, Bool>,
}

#[derive(Module, Debug)]
struct PlainBlock {
    attention_norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    output: Linear,
    mlp_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
    heads: usize,
    kv_heads: usize,
}

impl PlainLlama {
    fn new(from: &Decoder, seq_len: usize, device: &Device) -> Self {
        let config = from.config();
        let weights = Weights::of(from, device);
        let mut embedding = EmbeddingConfig::new(config.vocab, config.hidden).init(device);
        embedding.weight = Param::from_tensor(weights.matrix("embedding.weight").narrow(
            0,
            0,
            config.vocab,
        ));
        let blocks = (0..config.layers).map(|index| PlainBlock::new(config, index, &weights));
        Self {
            embedding,
            blocks: blocks.collect(),
            norm: weights.norm("norm.gamma", config.norm_eps),
            loss: CrossEntropyLossConfig::new().init(device),
            rope: Rope::new(config, seq_len, device),
        }
    }

    /// The mean next-token loss. Tokens and labels are `[batch, seq]`.
    fn loss(&self, tokens: Tensor<2, Int>, labels: Tensor<2, Int>) -> Tensor<1> {
        let mut x = self.embedding.forward(tokens);
        for block in &self.blocks {
            x = block.forward(x, &self.rope);
        }
        let x = self.norm.forward(x);
        let logits = module::linear(x, self.embedding.weight.val().transpose(), None);
        self.loss
            .forward(logits.flatten(0, 1), labels.flatten(0, 1))
    }
}

impl PlainBlock {
    fn new(config: &DecoderConfig, index: usize, weights: &Weights) -> Self {
        let at = |field: &str| format!("blocks.{index}.{field}");
        let query = config.heads * config.head_dim;
        let kv = config.kv_heads * config.head_dim;
        let qkv = |columns| weights.linear(&at("attention.qkv.weight"), columns);
        let gate_up = |columns| weights.linear(&at("mlp.up.weight"), columns);
        let norm = |field| weights.norm(&at(field), config.norm_eps);
        Self {
            attention_norm: norm("attention_norm.gamma"),
            q: qkv(0..query),
            k: qkv(query..query + kv),
            v: qkv(query + kv..query + 2 * kv),
            output: weights.linear(&at("attention.output.weight"), 0..config.hidden),
            mlp_norm: norm("mlp_norm.gamma"),
            gate: gate_up(0..config.ffn),
            up: gate_up(config.ffn..2 * config.ffn),
            down: weights.linear(&at("mlp.down.weight"), 0..config.hidden),
            heads: config.heads,
            kv_heads: config.kv_heads,
        }
    }

    /// Maps `[batch, seq, hidden]` to the same shape.
    fn forward(&self, x: Tensor<3>, rope: &Rope) -> Tensor<3> {
        let x = x.clone() + self.attention(self.attention_norm.forward(x), rope);
        let n = self.mlp_norm.forward(x.clone());
        let inside = activation::silu(self.gate.forward(n.clone())) * self.up.forward(n);
        x + self.down.forward(inside)
    }

    fn attention(&self, x: Tensor<3>, rope: &Rope) -> Tensor<3> {
        let [batch, seq, hidden] = x.dims();
        let heads = self.heads;
        let kv_heads = self.kv_heads;
        let by_head = |x: Tensor<3>, heads: usize| {
            let head_dim = x.dims()[2] / heads;
            x.reshape([batch, seq, heads, head_dim]).swap_dims(1, 2)
        };
        // GQA: each key/value head serves several query heads.
        let repeat = |x: Tensor<4>| {
            let head_dim = x.dims()[3];
            let x = x.unsqueeze_dim::<5>(2).repeat_dim(2, heads / kv_heads);
            x.reshape([batch, heads, seq, head_dim])
        };
        let q = rope.rotate(by_head(self.q.forward(x.clone()), heads));
        let k = repeat(rope.rotate(by_head(self.k.forward(x.clone()), kv_heads)));
        let v = repeat(by_head(self.v.forward(x), kv_heads));
        let scale = 1.0 / (q.dims()[3] as f64).sqrt();
        let scores = (q * scale).matmul(k.transpose());
        let future = rope
            .future
            .clone()
            .unsqueeze::<4>()
            .expand([batch, heads, seq, seq]);
        let scores = scores.mask_fill(future, f32::NEG_INFINITY);
        let out = activation::softmax(scores, 3).matmul(v).swap_dims(1, 2);
        self.output.forward(out.reshape([batch, seq, hidden]))
    }
}

impl Rope {
    fn new(config: &DecoderConfig, seq_len: usize, device: &Device) -> Self {
        let rope = config.rope().expect("a Llama has rotary positions");
        let table = rope
            .init(0..seq_len, device)
            .expect("the model has this table");
        let twice = |half: &Tensor<3>| {
            let half = half.clone().squeeze_dim::<2>(1);
            Tensor::from_inner(Tensor::cat(vec![half.clone(), half], 1))
        };
        let future = Tensor::<2, Bool>::tril_mask([seq_len, seq_len], 0, device);
        Self {
            cos: twice(table.cos()),
            sin: twice(table.sin()),
            future,
        }
    }

    /// Rotates `[batch, heads, seq, head_dim]` in the half-split convention.
    fn rotate(&self, x: Tensor<4>) -> Tensor<4> {
        let half = x.dims()[3] / 2;
        let first = x.clone().narrow(3, 0, half);
        let second = x.clone().narrow(3, half, half);
        let turned = Tensor::cat(vec![-second, first], 3);
        x * self.cos.clone().unsqueeze() + turned * self.sin.clone().unsqueeze()
    }
}

/// The weights of a model by parameter path.
struct Weights {
    values: BTreeMap<String, TensorData>,
    device: Device,
}

impl Weights {
    fn of(model: &Decoder, device: &Device) -> Self {
        Self {
            values: read_params(model).into_iter().collect(),
            device: device.clone(),
        }
    }

    fn matrix(&self, path: &str) -> Tensor<2> {
        Tensor::from_data(self.values[path].clone(), &self.device)
    }

    fn linear(&self, path: &str, columns: Range<usize>) -> Linear {
        let weight = self.matrix(path).narrow(1, columns.start, columns.len());
        let [d_input, d_output] = weight.dims();
        let mut linear = LinearConfig::new(d_input, d_output)
            .with_bias(false)
            .init(&self.device);
        // Copied into its own memory: a view of the fused matrix would be a slower operand.
        linear.weight = Param::from_data(weight.into_data(), &self.device);
        linear
    }

    fn norm(&self, path: &str, epsilon: f64) -> RmsNorm {
        let gamma = self.values[path].clone();
        let config = RmsNormConfig::new(gamma.num_elements()).with_epsilon(epsilon);
        let mut norm = config.init(&self.device);
        norm.gamma = Param::from_data(gamma, &self.device);
        norm
    }
}
