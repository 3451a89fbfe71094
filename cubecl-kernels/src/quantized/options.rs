use burn::tensor::Tensor;

use super::amax::AmaxSource;
use super::counts::QuantizationCounts;
use super::found::FoundAmax;
use super::kept::KeptWeight;
use super::random_numbers::RandomNumbers;
use super::recipe::{MatrixRole, QuantizationRecipe};
use super::sequence_shards::SequenceShards;

/// How [`quantized_linear`](crate::quantized_linear) quantises its matrices.
#[derive(Clone, Debug)]
pub struct LinearQuantization {
    /// The formats, and what shares a scale.
    pub recipe: QuantizationRecipe,
    /// The largest magnitude of the input.
    pub input: AmaxSource,
    /// The largest magnitude of the weight.
    pub weight: AmaxSource,
    /// The largest magnitude of the result's gradient.
    pub gradient: AmaxSource,
    /// The largest magnitude of this rank's part of the weight, if the step of the optimizer found it.
    pub weight_amax: Option<FoundAmax>,
    /// That of the weight on all ranks, `[1]`, if the weight was [rounded](crate::SentAmax) since.
    pub sent_amax: Option<Tensor<1>>,
    /// Keeps the quantised weight while weights [do not change](crate::WeightSpan).
    pub kept: Option<KeptWeight>,
    /// Counts the elements that saturate or underflow, if it is given.
    pub counts: Option<QuantizationCounts>,
    /// What the recipe draws at random, if it does.
    pub random: RandomNumbers,
    /// Gathers quantised shards of tokens, if this rank has a shard; the recipe must have one scale
    /// for each matrix.
    pub shards: Option<SequenceShards>,
}

impl LinearQuantization {
    /// Quantises matrices that no other rank has a part of, each by its own largest magnitude.
    pub fn new(recipe: QuantizationRecipe) -> Self {
        Self {
            recipe,
            input: AmaxSource::default(),
            weight: AmaxSource::default(),
            gradient: AmaxSource::default(),
            weight_amax: None,
            sent_amax: None,
            kept: None,
            counts: None,
            random: RandomNumbers::new(0, ""),
            shards: None,
        }
    }

    /// How the shards of a matrix are gathered, if this rank has a shard of its tokens.
    pub(super) fn shards_of(&self, role: MatrixRole) -> Option<&SequenceShards> {
        self.shards.as_ref().filter(|shards| shards.of == role)
    }

    /// The largest magnitude of a matrix.
    pub(super) fn source(&self, role: MatrixRole) -> &AmaxSource {
        match role {
            MatrixRole::Input => &self.input,
            MatrixRole::Weight => &self.weight,
            MatrixRole::Gradient => &self.gradient,
        }
    }

    /// The same quantisation for a pass that is not trained on, such as an evaluation: delayed
    /// scaling records nothing, and no element is counted.
    #[must_use]
    pub fn without_record(&self) -> Self {
        Self {
            recipe: self.recipe,
            input: self.input.without_record(),
            weight: self.weight.without_record(),
            gradient: self.gradient.without_record(),
            sent_amax: self.sent_amax.clone(),
            random: self.random.clone(),
            shards: self.shards.clone(),
            weight_amax: self.weight_amax.clone(),
            // A kept weight is recorded and counted where it is quantised: not in this pass.
            kept: match self.weight {
                AmaxSource::Current(_) if self.counts.is_none() => self.kept.clone(),
                _ => None,
            },
            counts: None,
        }
    }
}
