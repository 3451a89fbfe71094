use std::sync::{Arc, Mutex, PoisonError};

use burn::{
    module::Module,
    nn::Initializer,
    prelude::{Device, Int},
    tensor::Tensor,
};
use megaburn_collective::{Group, region::gather_from_last_dim};
use megaburn_kernels::RopeTable;
use megaburn_parallel::{
    CrossEntropy, CrossEntropyConfig, GatedMlp, GatedMlpConfig, PlanBuilder, RmsNorm,
    RmsNormConfig, SelfAttention, SelfAttentionConfig, Sharded, VocabParallelEmbedding,
    VocabParallelEmbeddingConfig,
};

use crate::{LlamaConfig, ModelError};

impl LlamaConfig {
    /// This rank's shard of a freshly drawn model: normal with deviation 0.02, the projections into
    /// the residual stream scaled down by `sqrt(2 layers)` (Megatron's default).
    ///
    /// # Errors
    /// Sizes that no model can have, or that the group does not divide.
    /// # Collective
    /// Nothing is sent; every member of the tensor-parallel group makes its own shard.
    pub fn init(
        &self,
        group: &Group,
        sequence_parallel: bool,
        device: &Device,
    ) -> Result<Llama, ModelError> {
        self.validate()?;
        let vectors = |name: &str| {
            VocabParallelEmbeddingConfig::new(self.vocab, self.hidden)
                .with_sequence_parallel(sequence_parallel)
                .with_name(name)
                .init(group, device)
        };
        let blocks = (0..self.layers).map(|index| {
            Block::new(self, &format!("blocks.{index}"), group, sequence_parallel, device)
        });
        Ok(Llama {
            embedding: vectors("embedding")?,
            blocks: blocks.collect::<Result<_, _>>()?,
            norm: norm(self, group, sequence_parallel, device),
            head: if self.tied { None } else { Some(vectors("head")?) },
            parts: Parts {
                config: self.clone(),
                loss: CrossEntropyConfig::new(self.vocab).init(group)?,
                group: group.clone(),
                rope: Arc::default(),
            },
        })
    }
}

fn norm(config: &LlamaConfig, group: &Group, sequence_parallel: bool, device: &Device) -> RmsNorm {
    RmsNormConfig::new(config.hidden)
        .with_epsilon(config.norm_eps)
        .with_sequence_parallel(sequence_parallel)
        .init(group, device)
}

/// A decoder-only transformer.
///
/// Shapes: `S` sequence, `B` batch, `V` padded vocabulary, `n` tensor-parallel ranks. With sequence
/// parallelism the residual stream between the blocks holds `S / n`.
///
/// # Collective
/// All members of the tensor-parallel group call every method together.
#[derive(Module, Debug)]
pub struct Llama {
    /// Token vectors.
    pub embedding: VocabParallelEmbedding,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// The last norm.
    pub norm: RmsNorm,
    /// The output projection; none when tied to the embedding.
    pub head: Option<VocabParallelEmbedding>,
    #[module(skip)]
    parts: Parts,
}

/// What a Llama holds beside its parameters.
#[derive(Clone, Debug)]
struct Parts {
    config: LlamaConfig,
    loss: CrossEntropy,
    group: Group,
    /// The rotary table of the last device and sequence length: all calls of a run share one.
    rope: Arc<Mutex<Option<(Device, RopeTable)>>>,
}

impl Llama {
    /// This rank's columns of the logits.
    ///
    /// # Shapes
    /// tokens `[S, B]`, output `[S, B, V / n]`
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let rope = self.rope(tokens.dims()[0], &tokens.device());
        let mut x = self.embedding.forward(tokens);
        for block in &self.blocks {
            x = block.forward(x, &rope);
        }
        self.head.as_ref().unwrap_or(&self.embedding).logits(self.norm.forward(x))
    }

    /// The sum of the next-token losses in nats, and over how many tokens.
    ///
    /// # Shapes
    /// tokens and labels `[S, B]`; the sum is `[1]`, the same on every member
    pub fn loss(&self, tokens: Tensor<2, Int>, labels: Tensor<2, Int>) -> (Tensor<1>, usize) {
        self.parts.loss.forward_sum(self.forward(tokens), labels)
    }

    /// The logits of the whole vocabulary, on every member.
    ///
    /// # Shapes
    /// tokens `[S, B]`, output `[S, B, vocab]`
    pub fn full_logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let logits = gather_from_last_dim(self.forward(tokens), &self.parts.group);
        logits.narrow(2, 0, self.parts.config.vocab)
    }

    /// The sizes.
    pub fn config(&self) -> &LlamaConfig {
        &self.parts.config
    }

    fn rope(&self, seq_len: usize, device: &Device) -> RopeTable {
        let mut cached = self.parts.rope.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((place, table)) = &*cached
            && (place, table.num_positions()) == (device, seq_len)
        {
            return table.clone();
        }
        let table = self.parts.config.rope().init(0..seq_len, device);
        let table = table.expect("the configuration was validated");
        *cached = Some((device.clone(), table.clone()));
        table
    }
}

impl Sharded for Llama {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("embedding", &self.embedding);
        plan.children("blocks", &self.blocks);
        plan.child("norm", &self.norm);
        if let Some(head) = &self.head {
            plan.child("head", head);
        }
    }
}

/// One transformer block: attention and MLP, each behind a norm and added to its input.
#[derive(Module, Debug)]
pub struct Block {
    /// Before the attention.
    pub attention_norm: RmsNorm,
    /// The attention.
    pub attention: SelfAttention,
    /// Before the MLP.
    pub mlp_norm: RmsNorm,
    /// The MLP.
    pub mlp: GatedMlp,
}

impl Block {
    fn new(
        config: &LlamaConfig,
        name: &str,
        group: &Group,
        sequence_parallel: bool,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let LlamaConfig { hidden, ffn, heads, kv_heads, head_dim, layers, .. } = *config;
        let into_stream =
            Initializer::Normal { mean: 0.0, std: 0.02 / (2.0 * layers as f64).sqrt() };
        let attention = SelfAttentionConfig::new(hidden, heads, kv_heads, head_dim)
            .with_sequence_parallel(sequence_parallel)
            .with_output_initializer(into_stream.clone())
            .with_name(format!("{name}.attention"));
        let mlp = GatedMlpConfig::new(hidden, ffn)
            .with_sequence_parallel(sequence_parallel)
            .with_output_initializer(into_stream)
            .with_name(format!("{name}.mlp"));
        Ok(Self {
            attention_norm: norm(config, group, sequence_parallel, device),
            attention: attention.init(group, device)?,
            mlp_norm: norm(config, group, sequence_parallel, device),
            mlp: mlp.init(group, device)?,
        })
    }

    /// Applies the block.
    ///
    /// # Shapes
    /// `[S, B, H]`, unchanged (with sequence parallelism `[S / n, B, H]`); `rope` holds `S`
    /// positions
    pub fn forward(&self, x: Tensor<3>, rope: &RopeTable) -> Tensor<3> {
        let x = x.clone() + self.attention.forward(self.attention_norm.forward(x), rope);
        x.clone() + self.mlp.forward(self.mlp_norm.forward(x))
    }
}

impl Sharded for Block {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("attention_norm", &self.attention_norm);
        plan.child("attention", &self.attention);
        plan.child("mlp_norm", &self.mlp_norm);
        plan.child("mlp", &self.mlp);
    }
}
