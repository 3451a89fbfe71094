//! The biases of a rank's experts, composed of tensor operations: each row of a grouped GEMM gets the
//! bias of its expert.

use burn::{
    module::Param,
    tensor::{DType, Int, Tensor, TensorData},
};
use megaburn_collective::{Group, region::copy_to};

use crate::linear::ParallelLinear;

/// The biases of a rank's experts, one row each.
pub(super) struct ExpertBiases {
    /// `[experts, d_ffn / n]`, or twice as wide for a gated activation.
    up: Tensor<2>,
    /// `[experts, d_model]`
    down: Tensor<2>,
}

impl ExpertBiases {
    /// The biases of experts, given by their up and down matrices, or `None` if they have none. The
    /// ranks of `etp` share the experts: each adds its part of the down bias to its partial sum.
    pub(super) fn of<'a>(
        experts: impl Iterator<Item = [&'a ParallelLinear; 2]>,
        etp: &Group,
    ) -> Option<Self> {
        let both = experts.map(|[up, down]| Some((bias(&up.bias)?, bias(&down.bias)?)));
        let both: Vec<_> = both.collect::<Option<_>>()?;
        let (up, down): (Vec<_>, Vec<_>) = both.into_iter().unzip();
        if up.is_empty() {
            return None;
        }
        let down = copy_to(Tensor::stack(down, 0), etp);
        Some(Self {
            up: Tensor::stack(up, 0),
            down: down * (etp.size() as f64).recip(),
        })
    }

    /// Adds zero times a bias of each kind to the output of a layer whose experts have no row on this
    /// rank. The biases then have a gradient, which is zero: ranks that hold the same experts must all
    /// have gradients of the same parameters, because they sum them in the same order.
    pub(super) fn joined_without_rows(&self, y: Tensor<3>) -> Tensor<3> {
        let one = |biases: &Tensor<2>| biases.clone().narrow(0, 0, 1).narrow(1, 0, 1);
        let zero = (one(&self.up) + one(&self.down)) * 0.0;
        let dtype = y.dtype();
        y + zero.cast(dtype).reshape([1, 1, 1])
    }

    /// Adds the up biases to `rows`, which are sorted by expert.
    pub(super) fn add_up(&self, rows: Tensor<2>, rows_per_expert: &[usize]) -> Tensor<2> {
        if rows.dims()[0] == 0 {
            return rows;
        }
        let biases = of_rows(&self.up, rows_per_expert);
        let dtype = rows.dtype();
        rows + biases.cast(dtype)
    }

    /// Adds the down biases times the weight of each row to `rows`, which are sorted by expert.
    pub(super) fn add_down(
        &self,
        rows: Tensor<2>,
        rows_per_expert: &[usize],
        weights: Tensor<1>,
    ) -> Tensor<2> {
        if rows.dims()[0] == 0 {
            return rows;
        }
        let biases = of_rows(&self.down, rows_per_expert);
        let weighted = biases * weights.cast(DType::F32).unsqueeze_dim(1);
        let dtype = rows.dtype();
        rows + weighted.cast(dtype)
    }
}

fn bias(bias: &Option<Param<Tensor<1>>>) -> Option<Tensor<1>> {
    bias.as_ref().map(Param::val)
}

/// The bias of the expert of each row, in f32, in which the gradients of the rows are summed.
fn of_rows(biases: &Tensor<2>, rows_per_expert: &[usize]) -> Tensor<2> {
    let counts = rows_per_expert.iter().enumerate();
    let experts: Vec<i32> = counts
        .flat_map(|(expert, &rows)| std::iter::repeat_n(expert as i32, rows))
        .collect();
    let shape = [experts.len()];
    let device = biases.device();
    let experts = Tensor::<1, Int>::from_data(TensorData::new(experts, shape), &device);
    biases.clone().cast(DType::F32).select(0, experts)
}
