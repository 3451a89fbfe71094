//! Prediction of a text's next byte by Burn's `TransformerEncoder`, as Burn's example
//! `text-generation`, which reads subwords.

use std::sync::Arc;

use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    module::Module,
    nn::{
        Embedding, EmbeddingConfig, Linear, LinearConfig,
        attention::generate_autoregressive_mask,
        loss::CrossEntropyLossConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    prelude::{Device, Int, Tensor},
    tensor::TensorData,
};
use burn_train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
    metric::LossMetric,
};
use megaburn::{collective::ProcessGroups, prelude::Sharded};

use super::{LearnerArgs, bytes, launch};
use crate::Failure;

const SEQ_LEN: usize = 256;
const VOCAB: usize = 256;
const HIDDEN: usize = 512;
const LAYERS: usize = 6;

#[derive(Module, Sharded, Debug)]
struct Net {
    #[sharded(replicated)]
    tokens: Embedding,
    #[sharded(replicated)]
    positions: Embedding,
    #[sharded(replicated)]
    transformer: TransformerEncoder,
    #[sharded(replicated)]
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(VOCAB, HIDDEN).init(device),
            positions: EmbeddingConfig::new(SEQ_LEN, HIDDEN).init(device),
            transformer: TransformerEncoderConfig::new(HIDDEN, 4 * HIDDEN, 8, LAYERS)
                .with_norm_first(true)
                .with_dropout(0.0)
                .init(device),
            output: LinearConfig::new(HIDDEN, VOCAB).init(device),
        }
    }

    /// Predicts the byte after each of a sequence, but not the first.
    fn predict(&self, bytes: Tensor<2, Int>) -> ClassificationOutput {
        let [batch, seq] = bytes.dims();
        let seq = seq - 1;
        let input = bytes.clone().narrow(1, 0, seq);
        let labels = bytes.narrow(1, 1, seq).flatten::<1>(0, 1);
        let device = input.device();
        let positions = Tensor::arange(0..seq as i64, &device).unsqueeze();
        let x = self.tokens.forward(input) + self.positions.forward(positions);
        let mask = generate_autoregressive_mask(batch, seq, &device);
        let input = TransformerEncoderInput::new(x).mask_attn(mask);
        let output = self.output.forward(self.transformer.forward(input));
        let output = output.flatten::<2>(0, 1);
        let loss = CrossEntropyLossConfig::new().init(&device);
        let loss = loss.forward(output.clone(), labels.clone());
        ClassificationOutput::new(loss, output, labels)
    }
}

impl TrainStep for Net {
    type Input = Tensor<2, Int>;
    type Output = ClassificationOutput;

    fn step(&self, batch: Self::Input) -> TrainOutput<ClassificationOutput> {
        let item = self.predict(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl InferenceStep for Net {
    type Input = Tensor<2, Int>;
    type Output = ClassificationOutput;

    fn step(&self, batch: Self::Input) -> ClassificationOutput {
        self.predict(batch)
    }
}

#[derive(Clone)]
struct Sequences;

impl Batcher<Vec<u8>, Tensor<2, Int>> for Sequences {
    fn batch(&self, items: Vec<Vec<u8>>, device: &Device) -> Tensor<2, Int> {
        let shape = [items.len(), SEQ_LEN + 1];
        let bytes: Vec<i32> = items.concat().into_iter().map(i32::from).collect();
        Tensor::from_data(TensorData::new(bytes, shape), device)
    }
}

pub(super) fn train(
    args: &LearnerArgs,
    devices: &[Device],
    groups: Option<&ProcessGroups>,
) -> Result<(), Failure> {
    let text = bytes(args.data.clone())?;
    let items: Vec<Vec<u8>> = text.chunks_exact(SEQ_LEN + 1).map(<[u8]>::to_vec).collect();
    let (train, valid) = items.split_at(items.len() / 20 * 19);
    let train = &train[..args.items.unwrap_or(train.len()).min(train.len())];
    let loader = |items: &[Vec<u8>], seed: Option<u64>| -> Arc<dyn DataLoader<_>> {
        let mut builder = DataLoaderBuilder::new(Sequences)
            .batch_size(args.batch_of_gpu())
            .num_workers(2);
        if let Some(seed) = seed {
            builder = builder.shuffle(seed);
        }
        builder.build(InMemDataset::new(items.to_vec()))
    };
    let training = SupervisedTraining::new(&args.dir, loader(train, Some(1)), loader(valid, None))
        .metrics((LossMetric::new(),));
    launch(args, devices, groups, training, Net::new(&devices[0]), 3e-4)
}
