//! Handwritten digits and a small convolutional network with batch norms, as Burn's example `mnist`, or
//! with group norms.

use std::sync::Arc;

use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    module::Module,
    nn::{
        BatchNormConfig, GroupNormConfig, Linear, LinearConfig, PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
        loss::CrossEntropyLossConfig,
        norm::{Normalization, NormalizationConfig},
        pool::MaxPool2dConfig,
    },
    prelude::{Device, Int, Tensor},
    tensor::{TensorData, activation::gelu},
};
use burn_train::{
    ClassificationOutput, InferenceStep, SupervisedTraining, TrainOutput, TrainStep,
    metric::{AccuracyMetric, LossMetric},
};
use megaburn::{collective::ProcessGroups, prelude::Sharded};

use super::{LearnerArgs, Norm, bytes, launch};
use crate::Failure;

/// Height and width of an image.
const SIZE: usize = 28;
const CLASSES: usize = 10;
/// Channels of the three convolutions.
const CHANNELS: [usize; 4] = [1, 32, 64, 128];

#[derive(Module, Sharded, Debug)]
struct Net {
    #[sharded(replicated)]
    convolutions: Vec<Conv2d>,
    #[sharded(replicated)]
    norms: Vec<Normalization>,
    #[sharded(replicated)]
    hidden: Linear,
    #[sharded(replicated)]
    output: Linear,
}

impl Net {
    fn new(norm: Norm, device: &Device) -> Self {
        let norm = |&channels: &usize| {
            let config: NormalizationConfig = match norm {
                Norm::Batch => BatchNormConfig::new(channels).into(),
                Norm::Group => GroupNormConfig::new(8, channels).into(),
            };
            config.init(device)
        };
        let convolution = |pair: &[usize]| {
            let config = Conv2dConfig::new([pair[0], pair[1]], [3, 3]);
            config.with_padding(PaddingConfig2d::Valid).init(device)
        };
        let features = CHANNELS[3] * (SIZE - 6).pow(2) / 4;
        Self {
            convolutions: CHANNELS.windows(2).map(convolution).collect(),
            norms: CHANNELS[1..].iter().map(norm).collect(),
            hidden: LinearConfig::new(features, 128).init(device),
            output: LinearConfig::new(128, CLASSES).init(device),
        }
    }

    fn classify(&self, (images, classes): Batch) -> ClassificationOutput {
        let mut x = images;
        for (convolution, norm) in self.convolutions.iter().zip(&self.norms) {
            x = gelu(norm.forward(convolution.forward(x)));
        }
        let pool = MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init();
        let x = pool.forward(x);
        let output = self
            .output
            .forward(gelu(self.hidden.forward(x.flatten(1, 3))));
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), classes.clone());
        ClassificationOutput::new(loss, output, classes)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let item = self.classify(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.classify(batch)
    }
}

/// Images, `[batch, 1, height, width]`, and their classes, `[batch]`.
type Batch = (Tensor<4>, Tensor<1, Int>);

/// An image and its class.
type Item = (Vec<u8>, u8);

#[derive(Clone)]
struct Images;

impl Batcher<Item, Batch> for Images {
    fn batch(&self, items: Vec<Item>, device: &Device) -> Batch {
        let num = items.len();
        let (images, classes): (Vec<_>, Vec<_>) = items.into_iter().unzip();
        // The mean and standard deviation of MNIST.
        let pixel = |&byte: &u8| (f32::from(byte) / 255.0 - 0.1307) / 0.3081;
        let pixels: Vec<f32> = images.iter().flatten().map(pixel).collect();
        let classes: Vec<i32> = classes.into_iter().map(i32::from).collect();
        (
            Tensor::from_data(TensorData::new(pixels, [num, 1, SIZE, SIZE]), device),
            Tensor::from_data(TensorData::new(classes, [num]), device),
        )
    }
}

/// Loads the images of `split` (`train` or `t10k`), in the order of `seed` if there is one.
fn loader(
    args: &LearnerArgs,
    split: &str,
    seed: Option<u64>,
) -> Result<Arc<dyn DataLoader<Batch>>, Failure> {
    let file = |name: &str| bytes(args.data.join(format!("{split}-{name}-ubyte")));
    // A header of 16 bytes is in front of the images, and one of 8 in front of the classes.
    let (images, classes) = (file("images-idx3")?, file("labels-idx1")?);
    let images = images[16..].chunks_exact(SIZE * SIZE).map(<[u8]>::to_vec);
    let mut items: Vec<Item> = images.zip(classes[8..].iter().copied()).collect();
    if let Some(num) = args.items.filter(|_| seed.is_some()) {
        items.truncate(num);
    }
    let mut builder = DataLoaderBuilder::new(Images)
        .batch_size(args.batch_of_gpu())
        .num_workers(2);
    if let Some(seed) = seed {
        builder = builder.shuffle(seed);
    }
    Ok(builder.build(InMemDataset::new(items)))
}

pub(super) fn train(
    args: &LearnerArgs,
    devices: &[Device],
    groups: Option<&ProcessGroups>,
) -> Result<(), Failure> {
    let [train, valid] = [loader(args, "train", Some(1))?, loader(args, "t10k", None)?];
    let training = SupervisedTraining::new(&args.dir, train, valid)
        .metrics((LossMetric::new(), AccuracyMetric::new()));
    let net = Net::new(args.norm, &devices[0]);
    launch(args, devices, groups, training, net, 1e-3)
}
