use burn::{config::Config, module::Module, nn::Initializer, prelude::Device, tensor::Tensor};
use megaburn_collective::Group;
use megaburn_kernels::{AttentionOptions, RopeTable, apply_rope, attention};
use megaburn_mesh::Part;

use crate::{ParallelError, ParallelLinear, ParallelLinearConfig, PlanBuilder, Sharded};

/// Configuration of a [`SelfAttention`].
#[derive(Config, Debug)]
pub struct SelfAttentionConfig {
    /// Features of the residual stream.
    pub d_model: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads (groups); fewer than ranks are replicated.
    pub num_kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Whether queries, keys and values have biases.
    #[config(default = false)]
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    #[config(default = false)]
    pub output_bias: bool,
    /// A query sees only this many positions back.
    pub window: Option<usize>,
    /// Whether input and output hold this rank's stretch of the sequence only.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// How the query, key and value matrices start.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// How the output matrix starts.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub output_initializer: Initializer,
    /// The module's path in the model.
    pub path: Option<String>,
}

impl SelfAttentionConfig {
    /// This rank's heads.
    ///
    /// # Errors
    /// Heads that the ranks do not divide; see also [`ParallelLinearConfig::init`].
    pub fn init(&self, group: &Group, device: &Device) -> Result<SelfAttention, ParallelError> {
        let Self { d_model, num_heads, num_kv_heads, head_dim, sequence_parallel, .. } = *self;
        let ranks = group.size();
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads.max(ranks)) {
            let why = format!(
                "{num_heads} heads do not divide over {num_kv_heads} key/value heads and {ranks} ranks"
            );
            let name = self.path.clone().unwrap_or_else(|| "unnamed".into());
            return Err(ParallelError::Config { layer: "SelfAttention", name, why });
        }
        let heads = |count| Part::units(count, head_dim);
        let qkv = ParallelLinearConfig::column(d_model, (num_heads + 2 * num_kv_heads) * head_dim)
            .with_parts([heads(num_heads), heads(num_kv_heads), heads(num_kv_heads)])
            .with_bias(self.qkv_bias)
            .with_initializer(self.initializer.clone());
        let output = ParallelLinearConfig::row(num_heads * head_dim, d_model)
            .with_bias(self.output_bias)
            .with_initializer(self.output_initializer.clone());
        let layer = |mut config: ParallelLinearConfig, field: &str| {
            config.path = self.path.as_ref().map(|name| format!("{name}.{field}"));
            config.with_sequence_parallel(sequence_parallel).init(group, device)
        };
        Ok(SelfAttention {
            qkv: layer(qkv, "qkv")?,
            output: layer(output, "output")?,
            heads: num_heads / ranks,
            kv_heads: (num_kv_heads / ranks).max(1),
            head_dim,
            window: self.window,
        })
    }
}

/// Causal self-attention with rotary positions and grouped queries, its heads split over a group.
///
/// Source: Vaswani et al. (2017); Ainslie et al. (2023) for grouped queries.
/// # Collective
/// As a column and a row [`ParallelLinear`].
#[derive(Module, Debug)]
pub struct SelfAttention {
    /// Queries, keys and values of this rank's heads, `[d_model, (q + 2 kv) head_dim]`.
    pub qkv: ParallelLinear,
    /// The output projection, `[q head_dim, d_model]`.
    pub output: ParallelLinear,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
}

impl SelfAttention {
    /// Applies the attention.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`, unchanged (with sequence parallelism `seq` is this rank's stretch);
    /// `rope` holds the whole sequence's positions.
    pub fn forward(&self, x: Tensor<3>, rope: &RopeTable) -> Tensor<3> {
        let qkv = self.qkv.forward(x);
        let [seq, batch, _] = qkv.dims();
        let mut start = 0;
        let mut heads = |count: usize| {
            let part = qkv.clone().narrow(2, start, count * self.head_dim);
            start += count * self.head_dim;
            part.reshape([seq, batch, count, self.head_dim])
        };
        let q = apply_rope(heads(self.heads), rope);
        let k = apply_rope(heads(self.kv_heads), rope);
        let v = heads(self.kv_heads);
        let options = AttentionOptions { window: self.window, ..AttentionOptions::causal() };
        self.output.forward(attention(q, k, v, options))
    }
}

impl Sharded for SelfAttention {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("qkv", &self.qkv);
        plan.child("output", &self.output);
    }
}
