use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};

/// The label that the loss leaves out, as PyTorch's and Hugging Face's.
const IGNORED: i64 = -100;

/// Samples of `seq_len + 1` tokens as input and, one place on, labels. Only the first `counted`
/// samples take part in the loss.
///
/// # Shapes
/// `[seq_len, samples]` each, on the device without autodiff.
pub(super) fn inputs_and_labels(
    samples: &[Vec<u32>],
    counted: usize,
    device: &Device,
) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let seq_len = samples[0].len() - 1;
    let stretch = |start: usize| {
        let tokens = (start..start + seq_len)
            .flat_map(|position| samples.iter().map(move |sample| i64::from(sample[position])));
        let data = TensorData::new(tokens.collect::<Vec<i64>>(), [seq_len, samples.len()]);
        Tensor::from_data(data, device)
    };
    let labels = stretch(1);
    if counted >= samples.len() {
        return (stretch(0), labels);
    }
    if counted == 0 {
        return (stretch(0), Tensor::full([seq_len, samples.len()], IGNORED, device));
    }
    let rest = Tensor::full([seq_len, samples.len() - counted], IGNORED, device);
    (stretch(0), Tensor::cat(vec![labels.narrow(1, 0, counted), rest], 1))
}
