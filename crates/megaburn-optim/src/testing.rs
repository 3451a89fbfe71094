//! A module of two parameters, sharded like those of a model.

pub(crate) mod full_state;
pub(crate) mod layers;
pub(crate) mod moe;

use burn::{
    Tensor,
    module::{Module, Param},
    tensor::{Device, Distribution},
};
use megaburn_mesh::{Axis, FusedPart, ParamSpec, ShardPlan, ShardSpec, pad_vocab};

/// `matrix [rows, cols]` is split along its rows, which are padded to a multiple of 4 if there are
/// ranks to split it. `bias [cols]` has two units, which are replicated if there are more ranks.
#[derive(Module, Debug)]
pub(crate) struct Net {
    pub(crate) matrix: Param<Tensor<2>>,
    pub(crate) bias: Param<Tensor<1>>,
}

impl Net {
    pub(crate) fn new(rows: usize, cols: usize, rank: usize, ranks: usize, device: &Device) -> Net {
        let plan = plan_of(rows, cols, rank, ranks);
        let shape = |path: &str| plan.get(path).expect("planned").shard.local_shape();
        let normal = Distribution::Normal(0.0, 1.0);
        Net {
            matrix: Param::from_tensor(Tensor::random(shape("matrix"), normal, device)),
            bias: Param::from_tensor(Tensor::random(shape("bias"), normal, device)),
        }
    }
}

pub(crate) fn plan_of(rows: usize, cols: usize, rank: usize, ranks: usize) -> ShardPlan {
    let padded = if ranks == 1 {
        rows
    } else {
        pad_vocab(rows, 4, ranks)
    };
    let matrix = ShardSpec::split_padded(&[rows, cols], 0, padded, Axis::Tp, rank, ranks);
    let units = match ranks {
        3 => FusedPart::new(cols),
        _ => FusedPart::units(2, cols / 2),
    };
    let bias = ShardSpec::split(&[cols], 0, &[units], Axis::Tp, rank, ranks);
    let mut plan = ShardPlan::new();
    plan.insert(
        "matrix",
        ParamSpec {
            shard: matrix.expect("divides"),
        },
    )
    .expect("new");
    plan.insert(
        "bias",
        ParamSpec {
            shard: bias.expect("divides"),
        },
    )
    .expect("new");
    plan
}

/// A rank's local tensor, cut from the global one; padding is zero.
pub(crate) fn cut(shard: &ShardSpec, global: &[f32]) -> Vec<f32> {
    let mut local = vec![0.0; shard.local_shape().iter().product()];
    for piece in &shard.pieces {
        shard.for_each_run(piece, |l, g, n| {
            local[l..l + n].copy_from_slice(&global[g..g + n])
        });
    }
    local
}

pub(crate) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("f32")
}

/// A parameter that is not needed to read an f32 master.
pub(crate) fn unused() -> Tensor<1> {
    unreachable!("the master is not stored as a remainder")
}
