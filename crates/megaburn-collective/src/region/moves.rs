//! Region moves on host data: a collective on contiguous bytes, with a split before it and a
//! concatenation after it along any dimension.

use burn::tensor::{DType, TensorData};

use crate::{
    call::{Collective, ReduceOp},
    error::CollectiveError,
    group::Group,
    joined::joined,
};

/// One direction of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    Identity,
    AllReduce,
    AllReduceMax,
    AllGather { dim: usize },
    ReduceScatter { dim: usize },
    Split { dim: usize },
    AllToAll { split: usize, concat: usize },
    Shift { by: isize },
}

pub(crate) fn run(
    data: TensorData,
    mv: Move,
    group: &Group,
) -> Result<TensorData, CollectiveError> {
    let size = group.size();
    let divides =
        |dim, op, data: &TensorData| check_divides(data.shape(), data.dtype(), dim, op, group);
    match mv {
        Move::Identity => Ok(data),
        Move::AllReduce => group.all_reduce(data, ReduceOp::Sum),
        Move::AllReduceMax => group.all_reduce(data, ReduceOp::Max),
        Move::AllGather { dim } => {
            let outer = outer(&data, dim);
            let shape = data.shape().to_vec();
            let gathered = group.all_gather(data)?;
            if outer == 1 {
                return Ok(reshape(gathered, scaled(&shape, dim, size)));
            }
            Ok(join(&cut(&gathered, 0, size), dim))
        }
        Move::ReduceScatter { dim } => {
            divides(dim, Collective::ReduceScatter(ReduceOp::Sum), &data)?;
            let mut shape = data.shape().to_vec();
            shape[dim] /= size;
            let stacked = if outer(&data, dim) == 1 {
                flat(data)
            } else {
                flat(join(&cut(&data, dim, size), 0))
            };
            Ok(reshape(
                group.reduce_scatter(stacked, ReduceOp::Sum)?,
                shape,
            ))
        }
        Move::Split { dim } => {
            divides(dim, Collective::AllGather, &data)?;
            Ok(cut(&data, dim, size).swap_remove(group.rank()))
        }
        Move::AllToAll { split, concat } => {
            divides(split, Collective::AllToAll, &data)?;
            Ok(join(&group.all_to_all(cut(&data, split, size))?, concat))
        }
        Move::Shift { by } if group.at(by) == group.rank() => Ok(data),
        Move::Shift { by } => group.run_on_host(Collective::Shift { by }, data),
    }
}

/// Refuses a dimension that the members do not divide.
pub(super) fn check_divides(
    shape: &[usize],
    dtype: DType,
    dim: usize,
    op: Collective,
    group: &Group,
) -> Result<(), CollectiveError> {
    let len = shape[dim];
    let size = group.size();
    if len.is_multiple_of(size) {
        return Ok(());
    }
    let call = group.next_call(op, dtype, shape);
    let why = format!("dimension {dim} has {len} elements, not divisible by {size} members");
    group.refuse(&call, why)
}

fn outer(data: &TensorData, dim: usize) -> usize {
    data.shape()[..dim].iter().product()
}

fn scaled(shape: &[usize], dim: usize, by: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    shape[dim] *= by;
    shape
}

fn reshape(data: TensorData, shape: Vec<usize>) -> TensorData {
    let (bytes, _, dtype) = data.into_parts();
    TensorData::from_bytes(bytes, shape, dtype)
}

/// Flattens the data to one dimension, which reduce-scatter splits evenly whatever the original
/// rank.
fn flat(data: TensorData) -> TensorData {
    let elements = data.num_elements();
    reshape(data, vec![elements])
}

/// Splits the data into `count` equal parts along `dim`.
fn cut(data: &TensorData, dim: usize, count: usize) -> Vec<TensorData> {
    let mut shape = data.shape().to_vec();
    shape[dim] /= count;
    let share: usize = shape[dim..].iter().product::<usize>() * data.dtype().size();
    let bytes: &[u8] = data.bytes();
    let rows = outer(data, dim);
    (0..count)
        .map(|index| {
            let starts = (0..rows).map(|row| (row * count + index) * share);
            let out = joined(
                starts.map(|start| &bytes[start..start + share]),
                data.dtype(),
            );
            TensorData::from_bytes(out, shape.clone(), data.dtype())
        })
        .collect()
}

/// Concatenates equal parts along `dim`.
fn join(parts: &[TensorData], dim: usize) -> TensorData {
    let first = &parts[0];
    let shape = scaled(first.shape().as_slice(), dim, parts.len());
    let share: usize = first.shape()[dim..].iter().product::<usize>() * first.dtype().size();
    let stretches = (0..outer(first, dim)).flat_map(|row| {
        parts
            .iter()
            .map(move |part| &part.bytes()[row * share..][..share])
    });
    TensorData::from_bytes(joined(stretches, first.dtype()), shape, first.dtype())
}
