//! The attention of one part, and its gradients, which are summed over parts.

use burn::tensor::{DType, Device, Tensor};
use megaburn_kernels::{
    PartialAttention, add_rows, partial_attention, partial_attention_gradients,
};

use super::parts::KeyValuePart;
use crate::max_logits::MaxLogitsRecorder;

/// The partial attention of a part's queries to its keys. `recorder` records its largest logits.
pub(super) fn attend(
    part: &KeyValuePart,
    [q, k, v]: [&Tensor<4>; 3],
    recorder: Option<&MaxLogitsRecorder>,
) -> PartialAttention {
    let KeyValuePart {
        queries,
        keys,
        options,
    } = part;
    let [q, k, v] = [rows(q, queries), rows(k, keys), rows(v, keys)];
    if let Some(recorder) = recorder {
        recorder.add([&q, &k], options);
    }
    partial_attention(q, k, v, options.clone())
}

/// The gradients of a part's queries, keys and values, given the merged result of all parts.
pub(super) fn gradients(
    part: &KeyValuePart,
    [q, k, v]: [&Tensor<4>; 3],
    whole: &PartialAttention,
    dout: &Tensor<4>,
) -> [Tensor<4>; 3] {
    let KeyValuePart {
        queries,
        keys,
        options,
    } = part;
    let of_queries = PartialAttention {
        out: rows(&whole.out, queries),
        lse: if queries.len() == whole.lse.dims()[2] {
            whole.lse.clone()
        } else {
            whole.lse.clone().narrow(2, queries.start, queries.len())
        },
    };
    let inputs = [rows(q, queries), rows(k, keys), rows(v, keys)];
    partial_attention_gradients(inputs, of_queries, rows(dout, queries), options.clone())
}

/// A gradient that is accumulated from parts.
#[derive(Debug)]
pub(super) struct GradientSum {
    shape: [usize; 4],
    dtype: DType,
    sum: Option<Tensor<4>>,
}

impl GradientSum {
    /// An empty sum.
    pub(super) fn new(shape: [usize; 4], dtype: DType) -> Self {
        Self {
            shape,
            dtype,
            sum: None,
        }
    }

    /// Continues a partial sum.
    pub(super) fn of(sum: Tensor<4>) -> Self {
        Self {
            shape: sum.dims(),
            dtype: sum.dtype(),
            sum: Some(sum),
        }
    }

    /// Adds the gradient of the rows from `start` on.
    pub(super) fn add(&mut self, start: usize, gradient: Tensor<4>) {
        self.sum = Some(match self.sum.take() {
            None if gradient.dims() == self.shape => gradient.cast(self.dtype),
            sum => {
                let device = gradient.device();
                add_rows(
                    sum.unwrap_or_else(|| self.nothing(&device)),
                    start,
                    gradient,
                )
            }
        });
    }

    /// The sum, or zeros on `device` if nothing was added.
    pub(super) fn finish(self, device: &Device) -> Tensor<4> {
        match self.sum {
            Some(sum) => sum,
            None => self.nothing(device),
        }
    }

    fn nothing(&self, device: &Device) -> Tensor<4> {
        Tensor::zeros(self.shape, (device, self.dtype))
    }
}

/// Rows `of` the first dimension.
fn rows(x: &Tensor<4>, of: &std::ops::Range<usize>) -> Tensor<4> {
    if *of == (0..x.dims()[0]) {
        x.clone()
    } else {
        x.clone().narrow(0, of.start, of.len())
    }
}
