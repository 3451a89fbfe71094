//! Numbers of the host that ranks combine.

use burn::tensor::TensorData;
use megaburn_collective::{CollectiveError, Group, ProcessGroups, ReduceOp};

use crate::error::TrainError;

/// The sum of a number over all members.
///
/// # Collective
/// All members.
pub(crate) fn sum_over(group: &Group, value: f64) -> Result<f64, CollectiveError> {
    Ok(sums_over(group, &[value])?[0])
}

/// The sum of each number over all members.
///
/// # Collective
/// All members.
pub(crate) fn sums_over(group: &Group, values: &[f64]) -> Result<Vec<f64>, CollectiveError> {
    reduce(group, values, ReduceOp::Sum)
}

/// The maximum of each number over all ranks.
///
/// # Collective
/// All ranks.
pub(crate) fn world_max(groups: &ProcessGroups, values: &[f64]) -> Result<Vec<f64>, TrainError> {
    Ok(reduce(&groups.world, values, ReduceOp::Max)?)
}

fn reduce(group: &Group, values: &[f64], op: ReduceOp) -> Result<Vec<f64>, CollectiveError> {
    let data = group.all_reduce(TensorData::from(values), op)?;
    Ok(data.try_to_vec().expect("the tensor is f64"))
}
