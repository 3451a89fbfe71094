use burn::{
    config::Config,
    module::{Content, DisplaySettings, Module, ModuleDisplay, Param},
    nn::{self, Initializer},
    prelude::{Device, Int},
    tensor::Tensor,
};
use megaburn_autograd::MainGrad;
use megaburn_collective::{Group, region::Partial};
use megaburn_kernels::{EmbeddingOptions, LinearOptions, embedding, linear};
use megaburn_mesh::{Axis, ShardSpec, pad_vocab};

use crate::{
    adapters::{is_adapted, weight_value, weight_value_as},
    cross_entropy::CrossEntropy,
    display::one_line,
    error::ParallelError,
    init::{InitDraw, named},
    linear::column_input,
    parallelize::{Cut, Kind, Layers, Rule, SplitLayer, cut},
    recomputable::Recomputable,
    shards::{PlanBuilder, Sharded},
    vocab_bias::VocabParallelBias,
};

/// Configuration of a [`VocabParallelEmbedding`].
#[derive(Config, Debug)]
pub struct VocabParallelEmbeddingConfig {
    /// Tokens of the vocabulary, without padding.
    pub n_embedding: usize,
    /// Features of a vector.
    pub d_model: usize,
    /// The vocabulary is padded to a multiple of this times the group's size.
    #[config(default = 128)]
    pub pad_multiple: usize,
    /// Whether the output is sharded along the sequence.
    #[config(default = false)]
    pub sequence_parallel: bool,
    /// Initializer of the vectors.
    #[config(default = "Initializer::Normal { mean: 0.0, std: 0.02 }")]
    pub initializer: Initializer,
    /// The layer's path in the model. Required in a group of more than one.
    pub path: Option<String>,
}

named!(VocabParallelEmbeddingConfig);

impl VocabParallelEmbeddingConfig {
    /// Builds this rank's rows.
    ///
    /// # Errors
    /// The layer has no name and the group more than one rank.
    pub fn init(
        &self,
        group: &Group,
        device: &Device,
    ) -> Result<VocabParallelEmbedding, ParallelError> {
        let Self {
            n_embedding,
            d_model,
            pad_multiple,
            sequence_parallel,
            ..
        } = *self;
        let padded = pad_vocab(n_embedding, pad_multiple, group.size());
        let spec = ShardSpec::split_padded(
            &[n_embedding, d_model],
            0,
            padded,
            Axis::Tp,
            group.rank(),
            group.size(),
        )
        .map_err(|source| ParallelError::Shard {
            name: self.path.clone().unwrap_or_else(|| "unnamed".into()),
            source,
        })?;
        let draw = InitDraw {
            layer: "VocabParallelEmbedding",
            name: self.path.as_deref(),
            field: "weight",
            initializer: &self.initializer,
            fans: [n_embedding, d_model],
        };
        let weight = draw.param(&spec, group, device)?;
        Ok(VocabParallelEmbedding {
            weight,
            rows: EmbeddingRows {
                spec,
                sequence_parallel,
                group: group.clone(),
                path: self.path.clone(),
                main_grad: MainGrad::default(),
                copied_on: None,
            },
        })
    }
}

/// Token vectors whose rows are split over a group. The vocabulary is padded to divide evenly;
/// padding rows are not part of the model: they are initialized to zero and stay zero.
///
/// Source: Megatron-LM `megatron/core/tensor_parallel/layers.py`, `VocabParallelEmbedding`.
/// # Collective
/// Forward: one all-reduce (with sequence parallelism one reduce-scatter). Backward: none (one
/// all-gather).
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct VocabParallelEmbedding {
    /// This rank's rows, `[padded vocabulary / n, d_model]`.
    pub weight: Param<Tensor<2>>,
    #[module(skip)]
    rows: EmbeddingRows,
}

#[derive(Clone, Debug)]
struct EmbeddingRows {
    spec: ShardSpec,
    sequence_parallel: bool,
    group: Group,
    path: Option<String>,
    main_grad: MainGrad,
    /// The ranks that hold copies of a layer that is not split.
    copied_on: Option<Group>,
}

impl VocabParallelEmbedding {
    /// Looks up the vectors of token ids.
    ///
    /// # Shapes
    /// - ids: `[seq, batch]`, the same on every member; each below the vocabulary's size
    /// - output: `[seq, batch, d_model]`; with sequence parallelism `[seq / n, batch, d_model]`
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let EmbeddingRows {
            spec,
            sequence_parallel,
            group,
            ..
        } = &self.rows;
        let main_grad = self.main_grad();
        if group.size() == 1 {
            let options = EmbeddingOptions {
                first: None,
                main_grad,
            };
            return embedding(self.weight_value(), ids, options);
        }
        let first = Some(group.rank() * spec.local_len);
        let vectors = embedding(
            self.weight_value(),
            ids,
            EmbeddingOptions { first, main_grad },
        );
        let partial = Partial::new(vectors, group);
        if *sequence_parallel {
            partial.reduce_scatter().into_shard()
        } else {
            partial.all_reduce()
        }
    }

    /// Multiplies hidden states with every token's vector. These are the logits when the vectors
    /// are a model's output projection (its own, or tied to the input).
    ///
    /// # Shapes
    /// - x: `[seq, batch, d_model]`; with sequence parallelism `[seq / n, batch, d_model]`
    /// - output: `[seq, batch, padded vocabulary / n]`, this rank's tokens
    /// # Collective
    /// As a column-parallel [`crate::ParallelLinear`].
    pub fn logits(&self, x: impl Into<Recomputable<3>>) -> Tensor<3> {
        let (x, options) = self.output_input(x.into());
        let weight = weight_value_as(&self.weight, self.holders(), x.dtype());
        linear(x, weight, None, options)
    }

    /// As [`logits`](Self::logits), plus a bias for each token.
    ///
    /// # Shapes
    /// As [`logits`](Self::logits)
    /// # Collective
    /// As [`logits`](Self::logits).
    ///
    /// # Panics
    /// If the bias is of another vocabulary.
    pub fn logits_with_bias(
        &self,
        x: impl Into<Recomputable<3>>,
        bias: &VocabParallelBias,
    ) -> Tensor<3> {
        let (x, options) = self.output_input(x.into());
        let (bias, bias_grad) = bias.parts();
        let options = LinearOptions {
            bias_grad: Some(bias_grad),
            ..options
        };
        let weight = weight_value_as(&self.weight, self.holders(), x.dtype());
        linear(x, weight, Some(bias), options)
    }

    /// The losses of [`logits`](Self::logits) without holding all logits at once; see
    /// [`CrossEntropy::forward_linear`].
    ///
    /// # Shapes
    /// - x: `[seq, batch, d_model]`; with sequence parallelism `[seq / n, batch, d_model]`
    /// - labels, output: `[seq, batch]`, the same on every member
    /// # Collective
    /// As [`logits`](Self::logits) and `loss` together.
    pub fn losses(
        &self,
        x: impl Into<Recomputable<3>>,
        labels: Tensor<2, Int>,
        loss: &CrossEntropy,
    ) -> Tensor<2> {
        let (x, options) = self.output_input(x.into());
        let weight = weight_value_as(&self.weight, self.holders(), x.dtype());
        loss.forward_linear(x, weight, labels, options)
    }

    /// The hidden states as input of every member's product, and the options of that product.
    fn output_input(&self, x: Recomputable<3>) -> (Tensor<3>, LinearOptions) {
        let EmbeddingRows {
            sequence_parallel,
            group,
            ..
        } = &self.rows;
        let (x, again) = column_input(x, group, *sequence_parallel).into_parts();
        let main_grad = self.main_grad();
        (
            x,
            LinearOptions {
                out_in: true,
                main_grad,
                again,
                ..Default::default()
            },
        )
    }

    /// The ranks that split the layer, or hold copies of it.
    fn holders(&self) -> &Group {
        self.rows.copied_on.as_ref().unwrap_or(&self.rows.group)
    }

    fn weight_value(&self) -> Tensor<2> {
        weight_value(&self.weight, self.holders())
    }

    /// The main gradient of the vectors; `None` if the gradient is that of low-rank factors.
    fn main_grad(&self) -> Option<MainGrad> {
        (!is_adapted(&self.weight)).then(|| self.rows.main_grad.clone())
    }

    /// Marks the layer as copy `copy`, where pipeline stages share the vectors. Only copy 0 counts
    /// in norms and checkpoints.
    #[must_use]
    pub fn as_copy(mut self, copy: usize) -> Self {
        self.rows.spec = self.rows.spec.copy(copy);
        self
    }

    /// Returns the layer with the same weights for full sequences, as generation needs it.
    pub fn whole_sequence(mut self) -> Self {
        self.rows.sequence_parallel = false;
        self
    }

    /// Tokens of the vocabulary, without padding.
    pub fn n_embedding(&self) -> usize {
        self.rows.spec.global_shape[0]
    }
}

/// The same layer with the same vectors, on one rank. [`parallelize`](crate::parallelize) splits it.
/// An adapter of the vectors is merged.
impl From<nn::Embedding> for VocabParallelEmbedding {
    fn from(layer: nn::Embedding) -> Self {
        let layer = layer.materialize();
        let shape = layer.weight.val().dims();
        Self {
            weight: layer.weight,
            rows: EmbeddingRows {
                spec: ShardSpec::whole(&shape, Axis::Tp, 0, 1),
                sequence_parallel: false,
                group: Group::single(0),
                path: None,
                main_grad: MainGrad::default(),
                copied_on: None,
            },
        }
    }
}

impl SplitLayer for VocabParallelEmbedding {
    fn kind(&self) -> Kind {
        Kind::Embedding
    }

    fn weight(&self) -> &Param<Tensor<2>> {
        &self.weight
    }

    fn group(&self) -> &Group {
        &self.rows.group
    }

    fn split_by(
        &mut self,
        rule: Option<&Rule>,
        path: &str,
        group: &Group,
    ) -> Result<(), ParallelError> {
        let (rank, ranks) = (group.rank(), group.size());
        let shape = self.rows.spec.global_shape.clone();
        if rule.is_none() {
            self.rows.spec = ShardSpec::whole(&shape, Axis::Tp, rank, ranks);
            self.rows.copied_on = Some(group.clone());
            return Ok(());
        }
        let padded = pad_vocab(shape[0], 1, ranks);
        let spec = ShardSpec::split_padded(&shape, 0, padded, Axis::Tp, rank, ranks);
        let spec = spec.map_err(|source| ParallelError::Shard {
            name: path.into(),
            source,
        })?;
        let place = Cut {
            layer: path,
            field: "weight",
            group,
        };
        self.weight = cut(&self.weight, &spec, place);
        self.rows = EmbeddingRows {
            spec,
            group: group.clone(),
            path: Some(path.into()),
            ..self.rows.clone()
        };
        Ok(())
    }
}

impl Sharded for VocabParallelEmbedding {
    fn shards(&self, plan: &mut PlanBuilder) {
        let rows = &self.rows;
        let group = self.holders();
        plan.drawn_from(rows.path.as_deref());
        plan.of_group(group);
        plan.matrix("weight", &rows.spec, self.main_grad());
        plan.adapter("weight", &self.weight, group);
    }

    fn parallelize(&mut self, layers: &mut Layers<'_>) {
        layers.split(self);
    }
}

impl ModuleDisplay for VocabParallelEmbedding {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        one_line()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [n_embedding, d_model] = [0, 1].map(|dim| self.rows.spec.global_shape[dim]);
        let split = match self.rows.copied_on {
            Some(_) => "none",
            None => "tokens",
        };
        content
            .add("n_embedding", &n_embedding)
            .add("d_model", &d_model)
            .add("split", &split.to_owned())
            .add("ranks", &self.holders().size())
            .optional()
    }
}
