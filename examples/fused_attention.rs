//! A custom Burn module that switches from Burn's operations to megaburn's kernels, without the
//! trainer. The results agree, and on a GPU (`--features cuda`) one kernel replaces about a dozen.
//!
//! ```sh
//! cargo run --release --example fused_attention
//! ```

use burn::{
    module::Module,
    nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig},
    optim::{AdamWConfig, GradientsParams},
    prelude::{Device, Int},
    tensor::{Bool, DType, Distribution, Tensor, activation::softmax},
};
use megaburn::kernels::{
    AttentionOptions, CrossEntropyOptions, RopeConfig, RopeTable, apply_rope, attention,
    cross_entropy, is_on_gpu, rms_norm,
};

const VOCAB: usize = 16;
const SEQ: usize = 32;
const HEADS: usize = 4;
const HEAD: usize = 16;
/// The task is to recall the token this number of positions back.
const BACK: usize = 3;

/// One attention layer that learns to recall an earlier token.
#[derive(Module, Debug)]
struct Recall {
    embed: Embedding,
    norm: RmsNorm,
    qkv: Linear,
    head: Linear,
}

impl Recall {
    fn new(device: &Device) -> Self {
        let d = HEADS * HEAD;
        Self {
            embed: EmbeddingConfig::new(VOCAB, d).init(device),
            norm: RmsNormConfig::new(d).with_epsilon(1e-5).init(device),
            qkv: LinearConfig::new(d, 3 * d).with_bias(false).init(device),
            head: LinearConfig::new(d, VOCAB).with_bias(false).init(device),
        }
    }

    /// Maps tokens `[seq, batch]` to logits `[seq, batch, VOCAB]`.
    fn forward(&self, tokens: Tensor<2, Int>, rope: &RopeTable, fused: bool) -> Tensor<3> {
        let [seq, batch] = tokens.dims();
        let x = self.embed.forward(tokens);
        let x = if fused {
            rms_norm(x, self.norm.gamma.val(), 1e-5)
        } else {
            self.norm.forward(x)
        };
        let parts = self.qkv.forward(x).chunk(3, 2).into_iter();
        let mut parts = parts.map(|part| part.reshape([seq, batch, HEADS, HEAD]));
        let mut part = || parts.next().expect("there are three tensors");
        let q = apply_rope(part(), rope);
        let k = apply_rope(part(), rope);
        let v = part();
        let y = if fused {
            fused_attention(q, k, v)
        } else {
            burn_attention(q, k, v)
        };
        self.head.forward(y)
    }
}

/// Causal attention as one operation. The GPU kernel takes bf16, so other inputs are cast; a model
/// in bf16 needs no cast.
fn fused_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<3> {
    let dtype = q.dtype();
    let options = AttentionOptions::causal();
    if !is_on_gpu(&q) {
        return attention(q, k, v, options);
    }
    let [q, k, v] = [q, k, v].map(|x| x.cast(DType::BF16));
    attention(q, k, v, options).cast(dtype)
}

/// Causal attention of Burn's operations. Scores, mask and probabilities each take `seq * seq`
/// elements per head.
fn burn_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<3> {
    let [seq, batch, heads, d] = q.dims();
    let [q, k, v] = [q, k, v].map(|x| x.permute([1, 2, 0, 3]));
    let hidden = Tensor::<2, Bool>::tril_mask([seq, seq], 0, &q.device()).unsqueeze::<4>();
    let scores = q.matmul(k.transpose()) * (1.0 / (d as f64).sqrt());
    let y = softmax(scores.mask_fill(hidden, f32::NEG_INFINITY), 3).matmul(v);
    y.permute([2, 0, 1, 3]).reshape([seq, batch, heads * d])
}

/// Trains for 150 steps and returns the first and the last loss.
fn train(device: &Device, fused: bool) -> (f32, f32) {
    let device = device.clone().autodiff();
    device.seed(7);
    let mut model = Recall::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let rope = RopeConfig::new(HEAD).init(0..SEQ, &device.clone().inner());
    let rope = rope.expect("the head size is even");
    let mut losses = (0.0, 0.0);
    for step in 0..150 {
        let range = Distribution::Uniform(0.0, VOCAB as f64);
        let tokens = Tensor::<2, Int>::random([SEQ, 16], range, &device.clone().inner());
        let labels = tokens.clone().narrow(0, 0, SEQ - BACK);
        let logits = model.forward(Tensor::from_inner(tokens), &rope, fused);
        let logits = logits.narrow(0, BACK, SEQ - BACK);
        let options = CrossEntropyOptions::new(VOCAB);
        let loss = cross_entropy(logits, labels, options, |all_ranks| all_ranks).mean();
        losses.1 = loss.clone().into_scalar::<f32>();
        if step == 0 {
            losses.0 = losses.1;
        }
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, grads);
    }
    losses
}

fn main() {
    #[cfg(feature = "cuda")]
    let device = match megaburn::cuda::start() {
        Ok(_) => Device::cuda(0),
        Err(_) => Device::flex(),
    };
    #[cfg(not(feature = "cuda"))]
    let device = Device::flex();
    for (what, fused) in [("Burn's operations", false), ("megaburn's kernels", true)] {
        let (first, last) = train(&device, fused);
        println!("{what}: loss {first:.4} -> {last:.4}");
        assert!(last < 0.5 * first, "the loss does not decrease");
    }
}
