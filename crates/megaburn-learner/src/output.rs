//! Outputs that ranks send to rank 0 for its metrics.

use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData, kind::Basic},
};
use burn_train::{
    ClassificationOutput, ItemLazy, MultiLabelClassificationOutput, RegressionOutput,
    SequenceOutput,
};

/// An output of a training or validation step that rank 0 can receive from other ranks, so that metrics
/// cover the batches of all of them. The outputs of `burn-train` implement it. An output of your own
/// lists its tensors:
///
/// ```
/// use burn::{prelude::Device, tensor::{ExecutionError, Tensor, TensorData}};
/// use burn_train::ItemLazy;
/// use megaburn_learner::RankOutput;
///
/// struct Score {
///     loss: Tensor<1>,
///     scores: Tensor<2>,
/// }
///
/// impl ItemLazy for Score {
///     fn sync(self) -> Result<Self, ExecutionError> {
///         Ok(self)
///     }
/// }
///
/// impl RankOutput for Score {
///     fn loss(&self) -> Option<Tensor<1>> {
///         Some(self.loss.clone())
///     }
///
///     fn into_data(self) -> Vec<TensorData> {
///         vec![self.loss.into_data(), self.scores.into_data()]
///     }
///
///     fn from_data(data: Vec<TensorData>, device: &Device) -> Self {
///         let mut data = data.into_iter();
///         let mut next = || data.next().expect("`into_data` returns two tensors");
///         Self {
///             loss: Tensor::from_data(next(), device),
///             scores: Tensor::from_data(next(), device),
///         }
///     }
/// }
/// ```
pub trait RankOutput: ItemLazy + 'static {
    /// The loss of the batch, `[1]`: the same on the ranks of a tensor-parallel group, which is
    /// compared in the first steps of an epoch. `None` compares nothing.
    fn loss(&self) -> Option<Tensor<1>>;

    /// The values of the output's tensors, in an order of its own.
    fn into_data(self) -> Vec<TensorData>;

    /// The output with these values, in the same order, on `device`.
    fn from_data(data: Vec<TensorData>, device: &Device) -> Self;
}

/// The tensors of an output that was received.
struct Received<'a> {
    data: std::vec::IntoIter<TensorData>,
    device: &'a Device,
}

impl Received<'_> {
    fn next<const D: usize, K: Basic>(&mut self) -> Tensor<D, K> {
        let data = self.data.next().expect("it was sent by the same type");
        let dtype = data.dtype();
        Tensor::from_data(data, (self.device, dtype))
    }
}

fn received(data: Vec<TensorData>, device: &Device) -> Received<'_> {
    Received {
        data: data.into_iter(),
        device,
    }
}

impl RankOutput for () {
    fn loss(&self) -> Option<Tensor<1>> {
        None
    }

    fn into_data(self) -> Vec<TensorData> {
        Vec::new()
    }

    fn from_data(_: Vec<TensorData>, _: &Device) -> Self {}
}

/// Implements the trait for outputs that have a loss, outputs and targets.
macro_rules! of_three_tensors {
    ($($output:ty: $targets:ty),*) => {$(
        impl RankOutput for $output {
            fn loss(&self) -> Option<Tensor<1>> {
                Some(self.loss.clone())
            }

            fn into_data(self) -> Vec<TensorData> {
                vec![
                    self.loss.into_data(),
                    self.output.into_data(),
                    self.targets.into_data(),
                ]
            }

            fn from_data(data: Vec<TensorData>, device: &Device) -> Self {
                let mut data = received(data, device);
                let (loss, output) = (data.next(), data.next());
                let targets: $targets = data.next();
                Self::new(loss, output, targets)
            }
        }
    )*};
}

of_three_tensors!(
    ClassificationOutput: Tensor<1, Int>,
    MultiLabelClassificationOutput: Tensor<2, Int>,
    RegressionOutput: Tensor<2>
);

impl RankOutput for SequenceOutput {
    fn loss(&self) -> Option<Tensor<1>> {
        Some(self.loss.clone())
    }

    fn into_data(self) -> Vec<TensorData> {
        let mut data = vec![
            self.loss.into_data(),
            self.logits.into_data(),
            self.targets.into_data(),
        ];
        data.extend(self.predictions.map(Tensor::into_data));
        data
    }

    fn from_data(data: Vec<TensorData>, device: &Device) -> Self {
        let has_predictions = data.len() == 4;
        let mut data = received(data, device);
        let (loss, logits, targets) = (data.next(), data.next(), data.next());
        let predictions = has_predictions.then(|| data.next());
        Self::new(loss, logits, predictions, targets)
    }
}
