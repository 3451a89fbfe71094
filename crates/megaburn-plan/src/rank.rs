//! The sizes of one rank's part of a model and of a micro-batch.

use std::sync::Arc;

use megaburn_mesh::{Axis, Layout};
use megaburn_models::{DecoderConfig, decoder::Recompute};
use megaburn_parallel::ContextComm;
use megaburn_pipeline::StageLayers;
use megaburn_train::{
    TrainConfig,
    config::{Dtype, PrecisionRecipe},
};

use crate::{error::PlanError, links::Links, machine::Machine};

/// One rank of a run.
#[derive(Clone, Debug)]
pub(crate) struct Rank<'a> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) model: &'a DecoderConfig,
    pub(crate) layout: Layout,
    pub(crate) machine: Machine,
    pub(crate) recompute: Recompute,
    /// Bytes of an element of parameters and activations.
    pub(crate) element: f64,
    /// Bytes of an element of main gradients.
    pub(crate) gradient: f64,
    /// Micro-batches of a step.
    pub(crate) micro_batches: usize,
    divided: Arc<Divided>,
}

/// How a layout and a schedule divide the layers.
#[derive(Clone, Debug)]
struct Divided {
    /// The chunks of the rank of each stage.
    stages: Vec<Vec<StageLayers>>,
    /// How ranks exchange keys and values: one method, or one for each layer.
    comms: Vec<ContextComm>,
    /// For each block, the first one that takes as long.
    alike: Vec<usize>,
}

/// The tokens of a micro-batch in one half of an encoder-decoder model, or in any other model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens {
    /// Tokens of a sequence, over all ranks.
    pub(crate) seq_len: f64,
    /// Sequences of a micro-batch.
    pub(crate) sequences: f64,
    /// Tokens of the micro-batch on this rank.
    pub(crate) on_rank: f64,
    /// Tokens of this rank's residual stream.
    pub(crate) of_stream: f64,
}

/// Features and heads of this rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) hidden: f64,
    /// Features of queries.
    pub(crate) query: f64,
    /// Features of keys; of values as well, without latent attention.
    pub(crate) key_value: f64,
    /// Features of the values of all query heads.
    pub(crate) values: f64,
    /// The latents of latent attention.
    pub(crate) latents: Option<Latents>,
}

/// Features of latent attention on this rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Latents {
    /// Features of the query latent; `None` if queries are projected from the residual stream.
    pub(crate) query: Option<f64>,
    /// Features of the key/value latent, without those that are rotated.
    pub(crate) key_value: f64,
    /// Features of keys that are rotated, which all heads share.
    pub(crate) rotary: f64,
    /// Features of keys without rotation and of values, of all heads of this rank.
    pub(crate) up: f64,
}

impl<'a> Rank<'a> {
    pub(crate) fn new(
        config: &'a TrainConfig,
        model: &'a DecoderConfig,
        layout: Layout,
        machine: Machine,
    ) -> Result<Self, PlanError> {
        let micro_batches = match config.parallel.max_tokens_per_rank {
            Some(tokens) => {
                let all = config.train.global_batch * config.padded_seq_len(&layout);
                all.div_ceil(layout.dp * layout.cp * tokens).max(1)
            }
            None => config.train.num_micro_batches(layout.dp)?,
        };
        let width = |dtype| match dtype {
            Dtype::F32 => 4.0,
            Dtype::Bf16 | Dtype::F16 => 2.0,
        };
        let mut rank = Self {
            config,
            model,
            layout,
            machine,
            recompute: config.recompute.of_model(),
            element: width(config.train.dtype),
            gradient: width(config.optimizer.main_grads_dtype),
            micro_batches,
            divided: Arc::new(Divided {
                stages: config.parallel.stages(&layout, model.layers)?,
                comms: config.context_comms(&layout, model)?,
                alike: model.alike_blocks(),
            }),
        };
        let is_bf16 = config.precision.recipe == PrecisionRecipe::Bf16;
        if rank.divided.comms.len() > 1 || !is_bf16 {
            rank.divided = Arc::new(Divided {
                alike: rank.alike_in_run(),
                ..(*rank.divided).clone()
            });
        }
        Ok(rank)
    }

    /// The same rank with another configuration. Only the stage of ZeRO, the recomputation and the fused
    /// loss may differ.
    pub(crate) fn with_config<'b>(&self, config: &'b TrainConfig) -> Rank<'b>
    where
        'a: 'b,
    {
        Rank {
            config,
            recompute: config.recompute.of_model(),
            divided: self.divided.clone(),
            ..*self
        }
    }

    /// The chunks of the rank of each stage.
    pub(crate) fn stages(&self) -> &[Vec<StageLayers>] {
        &self.divided.stages
    }

    /// For each block, the first one like it that this run computes in the same precision, with the
    /// same exchange of keys and values.
    fn alike_in_run(&self) -> Vec<usize> {
        let mut seen = Vec::new();
        let first = |(index, alike): (usize, &usize)| {
            let kind = (*alike, self.is_quantized(index), self.context_comm(index));
            let known = seen.iter().find(|(known, _)| *known == kind);
            let first = known.map(|(_, first)| *first);
            first.unwrap_or_else(|| {
                seen.push((kind, index));
                index
            })
        };
        let alike = self.divided.alike.iter();
        alike.enumerate().map(first).collect()
    }

    /// The first block that takes as long and as much memory as block `index`.
    pub(crate) fn alike(&self, index: usize) -> usize {
        self.divided.alike[index]
    }

    /// The tokens that block `index` reads.
    pub(crate) fn tokens_of(&self, index: usize) -> Tokens {
        self.tokens(index < self.model.encoder_layers)
    }

    /// The tokens of the encoder, or those of the decoder or of a model without an encoder.
    pub(crate) fn tokens(&self, of_encoder: bool) -> Tokens {
        let Layout { tp, cp, sp, .. } = self.layout;
        let (seq_len, sequences, cp) = match self.config.parallel.max_tokens_per_rank {
            Some(tokens) => (tokens, 1, 1),
            None => {
                let padded = self.config.padded_seq_len(&self.layout);
                let is_decoder = self.model.is_encoder_decoder() && !of_encoder;
                let seq_len = if is_decoder {
                    self.config.data.decoder_seq_len
                } else {
                    padded
                };
                (seq_len, self.config.train.micro_batch, cp)
            }
        };
        let on_rank = (seq_len * sequences) as f64 / cp as f64;
        Tokens {
            seq_len: seq_len as f64,
            sequences: sequences as f64,
            on_rank,
            of_stream: if sp { on_rank / tp as f64 } else { on_rank },
        }
    }

    /// The number of ranks that share a sequence.
    pub(crate) fn context_ranks(&self) -> usize {
        match self.config.parallel.max_tokens_per_rank {
            Some(_) => 1,
            None => self.layout.cp,
        }
    }

    /// How the ranks exchange keys and values in block `index`.
    pub(crate) fn context_comm(&self, index: usize) -> ContextComm {
        let comms = &self.divided.comms;
        comms[index.min(comms.len() - 1)]
    }

    pub(crate) fn sizes(&self) -> Sizes {
        let DecoderConfig {
            hidden,
            heads,
            kv_heads,
            head_dim,
            ..
        } = *self.model;
        let tp = self.layout.tp;
        let heads = (heads / tp) as f64;
        let head_dim = head_dim as f64;
        let key_value = (kv_heads / tp).max(1) as f64 * head_dim;
        let latents = self.model.latent.as_ref().map(|latent| Latents {
            query: latent.q_lora_rank.map(|rank| rank as f64),
            key_value: latent.kv_lora_rank as f64,
            rotary: latent.qk_rope_head_dim as f64,
            up: heads * (latent.qk_nope_head_dim + latent.v_head_dim) as f64,
        });
        let values = match &self.model.latent {
            Some(latent) => heads * latent.v_head_dim as f64,
            None => heads * head_dim,
        };
        Sizes {
            hidden: hidden as f64,
            query: heads * head_dim,
            key_value,
            values,
            latents,
        }
    }

    /// The columns of the output matrix of a rank.
    pub(crate) fn vocab(&self) -> f64 {
        self.model.vocab as f64 / self.layout.tp as f64
    }

    /// The columns of the up matrix for `ffn` features inside the MLP.
    pub(crate) fn up(&self, ffn: f64) -> f64 {
        if self.model.activation.is_gated() {
            2.0 * ffn
        } else {
            ffn
        }
    }

    /// Whether the matrices of block `index` are quantised before they are multiplied.
    pub(crate) fn is_quantized(&self, index: usize) -> bool {
        let precision = &self.config.precision;
        let first = precision.num_layers_at_start_in_bf16;
        let last = self
            .model
            .layers
            .saturating_sub(precision.num_layers_at_end_in_bf16);
        precision.recipe != PrecisionRecipe::Bf16 && (first..last).contains(&index)
    }

    /// Bytes of an element that sequence parallelism gathers in block `index`.
    pub(crate) fn gathered_element(&self, index: usize) -> f64 {
        let precision = &self.config.precision;
        let has_scales = matches!(
            precision.recipe,
            PrecisionRecipe::Tensorwise | PrecisionRecipe::Delayed
        );
        if self.is_quantized(index) && has_scales && precision.fp8_sequence_gather {
            1.0
        } else {
            self.element
        }
    }

    /// Whether backward recomputes the block at this position of its stage.
    pub(crate) fn is_recomputed(&self, position: usize) -> bool {
        use megaburn_models::decoder::RecomputeBlocks::{Block, Uniform};
        match self.recompute.blocks {
            None => false,
            Some(Uniform(_)) => true,
            Some(Block(first)) => position < first,
        }
    }

    /// The connections between the ranks of a group.
    pub(crate) fn links(&self, axes: &[Axis]) -> Links {
        self.machine.links(&self.layout, axes)
    }
}
