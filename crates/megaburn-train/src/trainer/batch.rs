use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};

/// Samples of `seq_len + 1` tokens as input and, one place on, labels.
///
/// # Shapes
/// `[seq_len, samples]` each, on the device without autodiff.
pub(super) fn inputs_and_labels(
    samples: &[Vec<u32>],
    device: &Device,
) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let seq_len = samples[0].len() - 1;
    let stretch = |start: usize| {
        let tokens = (start..start + seq_len)
            .flat_map(|position| samples.iter().map(move |sample| i64::from(sample[position])));
        let data = TensorData::new(tokens.collect::<Vec<i64>>(), [seq_len, samples.len()]);
        Tensor::from_data(data, device)
    };
    (stretch(0), stretch(1))
}
