//! Sums of squares of the elements that a rank owns, for tensors shaped like parameters.

use std::{mem, ops::Range};

use burn::tensor::{DType, Device, Tensor};
use megaburn_kernels::partial_sums_of_squares;

use crate::{
    param_grad::ParamGrad, reduce::has_padding, sharding::joined, step::MULTI_TENSOR_CHUNK,
};

/// Sums of squares of the elements that this rank owns. They stay on its GPU and none is read. The
/// sums are not finite if any held element is not.
#[derive(Default)]
pub(crate) struct GradNormPartials {
    /// Tensors that this rank owns, whose squares are not summed yet.
    owned: Vec<Tensor<1>>,
    /// Tensors that contain uncounted copies too. Their squares are not counted, but they must be
    /// finite.
    held: Vec<Tensor<1>>,
    num_elements: usize,
    sums: Vec<Tensor<1>>,
    /// The device of the zero that [`finish`](Self::finish) returns if there are no sums.
    device: Option<Device>,
}

impl GradNormPartials {
    /// Adds what this rank keeps of a tensor; `None` counts as zero. Temporaries are held until
    /// about [`MULTI_TENSOR_CHUNK`] elements have been added.
    pub(crate) fn add(&mut self, entry: &ParamGrad, values: Option<Tensor<1>>) {
        let shard = &entry.spec.shard;
        let Some(values) = values else {
            self.device.get_or_insert_with(|| entry.device.clone());
            return;
        };
        self.num_elements += values.dims()[0];
        let owns_all = shard.pieces.iter().all(|piece| piece.replica == 0) && !has_padding(shard);
        if owns_all || entry.kept.is_empty() {
            self.owned.push(values);
        } else {
            let inner: usize = shard.global_shape.iter().skip(shard.dim + 1).product();
            let rows = full_rows(values.clone(), &entry.kept, shard.local_len * inner);
            for piece in shard.owned() {
                let [start, end] = [piece.local.start, piece.local.end].map(|at| at * inner);
                self.owned
                    .push(rows.clone().narrow(1, start, end - start).flatten(0, 1));
            }
            self.held.push(values);
        }
        if self.num_elements >= MULTI_TENSOR_CHUNK {
            self.sum();
        }
    }

    /// All sums; at least one if anything was added.
    pub(crate) fn finish(mut self) -> Vec<Tensor<1>> {
        self.sum();
        let nothing = self.device.filter(|_| self.sums.is_empty());
        self.sums
            .extend(nothing.map(|device| Tensor::zeros([1], (&device, DType::F32))));
        self.sums
    }

    fn sum(&mut self) {
        let of = |all: &mut Vec<Tensor<1>>| {
            (!all.is_empty()).then(|| partial_sums_of_squares(mem::take(all)))
        };
        self.sums.extend(of(&mut self.owned));
        // Zeros if all held elements are finite, NaN otherwise.
        self.sums
            .extend(of(&mut self.held).map(|sums| sums.mul_scalar(0.0)));
        self.num_elements = 0;
    }
}

/// The kept `part` of a tensor as the complete rows that it touches: `[rows, row]`, with zeros
/// where nothing is kept.
fn full_rows(part: Tensor<1>, kept: &Range<usize>, row: usize) -> Tensor<2> {
    let gap = |len| Tensor::zeros([len], (&part.device(), part.dtype()));
    let [front, back] = [kept.start % row, kept.end.next_multiple_of(row) - kept.end]
        .map(|len| (len > 0).then(|| gap(len)));
    let parts = front.into_iter().chain([part.clone()]).chain(back);
    joined(parts.collect()).reshape([-1, row as i64])
}

/// The sum of squares of the elements that this rank owns; not finite if any held element is not.
pub(crate) fn owned_squares(entry: &ParamGrad, values: Tensor<1>) -> f64 {
    let values = host(values);
    let kept = &entry.kept;
    let mut sum = 0.0;
    for piece in entry.spec.shard.owned() {
        entry.spec.shard.for_each_run(piece, |local, _, len| {
            let [start, end] =
                [local, local + len].map(|at| at.clamp(kept.start, kept.end) - kept.start);
            sum += values[start..end]
                .iter()
                .map(|&g| f64::from(g).powi(2))
                .sum::<f64>();
        });
    }
    // Zero, or NaN if an uncounted copy holds a non-finite value.
    let poison: f64 = values.iter().map(|&g| f64::from(g) * 0.0).sum();
    sum + poison
}

fn host(grad: Tensor<1>) -> Vec<f32> {
    grad.cast(DType::F32)
        .into_data()
        .try_to_vec()
        .expect("the tensor is f32")
}
