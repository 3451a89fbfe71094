//! The models that are measured, and megaburn's training step on them.

use burn::{
    module::Module,
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn::{
    collective::ProcessGroups,
    models::{Decoder, DecoderConfig, decoder::ModelOptions},
    optim::{AdamWConfig, GradientAccumulator, Optimizer, ShardingConfig, ShardingLevel},
    parallel::shard_plan,
    train::TrainConfig,
};

use crate::Failure;

/// Size of a byte-level vocabulary.
const VOCAB: usize = 260;

/// The main job's default model, and the tokens of a sample.
pub fn default_model() -> (DecoderConfig, usize) {
    let config = TrainConfig::default();
    (
        config.model.decoder(config.data.seq_len, VOCAB),
        config.data.seq_len,
    )
}

/// The default model at twice the width: four times the parameters and FLOPs per token.
pub fn larger_model() -> (DecoderConfig, usize) {
    let (small, seq_len) = default_model();
    let config = DecoderConfig {
        hidden: 2 * small.hidden,
        ffn: 2 * small.ffn,
        heads: 2 * small.heads,
        kv_heads: 2 * small.kv_heads,
        ..small
    };
    (config, seq_len)
}

/// Samples of a global batch.
pub fn global_batch() -> usize {
    TrainConfig::default().train.global_batch
}

/// The tokens and labels of the given samples of a fixed pseudo-random text.
///
/// # Shapes
/// `[seq, samples]` each, on the device without autodiff.
pub fn batch(seq_len: usize, samples: std::ops::Range<usize>) -> [Tensor<2, Int>; 2] {
    // Multiplies the index by a large odd constant (a Fibonacci hash) and maps it to the
    // vocabulary.
    let token = |sample: usize, position: usize| {
        let index = (sample * (seq_len + 1) + position + 1) as u64;
        (index.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) as i64 % VOCAB as i64
    };
    [0, 1].map(|ahead| {
        let samples = samples.clone();
        let tokens = (0..seq_len).flat_map(|position| {
            samples
                .clone()
                .map(move |sample| token(sample, position + ahead))
        });
        let data = TensorData::new(tokens.collect::<Vec<i64>>(), [seq_len, samples.len()]);
        Tensor::from_data(data, &Device::flex())
    })
}

/// Whether a step clips gradients before the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clip {
    /// AdamW alone.
    No,
    /// Gradient norm, clipping to 1 and AdamW, as the trainer does.
    ToOne,
}

/// One rank's model, data and optimizer, like the trainer's, but with a fixed batch.
#[derive(Debug)]
pub struct Megaburn {
    /// `None` only while the optimizer updates the model.
    model: Option<Decoder>,
    groups: ProcessGroups,
    grads: GradientAccumulator,
    optimizer: Optimizer,
    batch: [Tensor<2, Int>; 2],
}

impl Megaburn {
    /// Creates a freshly initialized model and this rank's share of the global batch, as one
    /// micro-batch.
    ///
    /// # Errors
    /// The model does not fit the layout or the sequence length.
    pub fn new(
        config: &DecoderConfig,
        seq_len: usize,
        groups: ProcessGroups,
    ) -> Result<Self, Failure> {
        let layout = groups.layout();
        config.check_seq_len(seq_len)?;
        config.check_layout(&layout, seq_len)?;
        let device = Device::flex().autodiff();
        let options = ModelOptions {
            sequence_parallel: layout.sp,
            ..ModelOptions::default()
        };
        let model = config.init(&groups.tp, &options, &device)?;
        let plan = shard_plan(&model)?;
        let sharding = ShardingConfig::new(ShardingLevel::None).init(&model, &groups)?;
        let share = global_batch() / layout.dp;
        let first = groups.dp.rank() * share;
        Ok(Self {
            grads: GradientAccumulator::new(&model, &plan, &sharding)?,
            optimizer: AdamWConfig::new().init(&sharding)?,
            batch: batch(seq_len, first..first + share),
            model: Some(model),
            groups,
        })
    }

    /// The model.
    pub fn model(&self) -> &Decoder {
        self.model
            .as_ref()
            .expect("the model is absent only during an update")
    }

    /// The mean loss of this rank's batch in nats, without automatic differentiation.
    pub fn forward(&self) -> f32 {
        let [tokens, labels] = self.batch.clone();
        let count = labels.shape().num_elements();
        self.model()
            .valid()
            .loss(tokens, labels)
            .into_scalar::<f32>()
            / count as f32
    }

    /// Runs one training step.
    ///
    /// # Errors
    /// A collective fails.
    /// # Collective
    /// All ranks.
    pub fn step(&mut self, clip: Clip) -> Result<(), Failure> {
        let [tokens, labels] = self.batch.clone();
        let model = self
            .model
            .take()
            .expect("the model is absent only during an update");
        let count = labels.shape().num_elements();
        let sum = model.loss(tokens, labels);
        self.grads.reset();
        self.grads.accumulate(&model, &mut sum.backward());
        self.grads.reduce()?;
        self.grads
            .scale(1.0 / (count * self.groups.dp.size()) as f64);
        if clip == Clip::ToOne {
            let norm = self.grads.norm()?;
            self.grads.clip(&norm, 1.0);
        }
        self.model = Some(self.optimizer.step(LEARNING_RATE, model, &self.grads)?);
        Ok(())
    }
}

/// Small, so that the weights stay within the normal range of floats.
pub(crate) const LEARNING_RATE: f64 = 1e-4;
