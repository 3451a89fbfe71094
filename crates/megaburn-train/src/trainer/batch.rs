use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};

/// The label that the loss leaves out, as PyTorch's and Hugging Face's.
const IGNORED: i64 = -100;

/// What a model reads, and what it is asked for.
pub(super) struct Batch {
    /// `[seq_len, samples]`.
    pub(super) tokens: Tensor<2, Int>,
    /// One place on, `[seq_len, samples]`.
    pub(super) labels: Tensor<2, Int>,
    /// Labels that take part in the loss.
    pub(super) counted: usize,
}

/// Samples of `seq_len + 1` tokens on the device without autodiff. Only the first `counted` samples
/// take part in the loss.
pub(super) fn tensors(samples: &[Vec<u32>], counted: usize, device: &Device) -> Batch {
    let seq_len = samples[0].len() - 1;
    let counted = counted.min(samples.len());
    let place = |position: usize| samples.iter().map(move |sample| i64::from(sample[position]));
    let matrix =
        |ids: Vec<i64>| Tensor::from_data(TensorData::new(ids, [seq_len, samples.len()]), device);
    let tokens = matrix((0..seq_len).flat_map(place).collect());
    let is_counted = |(sample, id)| if sample < counted { id } else { IGNORED };
    let labels = (1..=seq_len).flat_map(|position| place(position).enumerate().map(is_counted));
    Batch { tokens, labels: matrix(labels.collect()), counted: counted * seq_len }
}
