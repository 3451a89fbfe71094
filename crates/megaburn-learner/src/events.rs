//! Outputs of all ranks, and the events that rank 0 processes.

use burn::{
    data::dataloader::Progress,
    lr_scheduler::module_lr_scheduler::ModuleLearningRate,
    prelude::Device,
    tensor::{DType, Shape, TensorData},
};
use burn_train::{LearnerEvent, TrainingItem};
use megaburn_collective::{CollectiveError, ProcessGroups};

use crate::output::RankOutput;

/// The outputs of a step of all data-parallel ranks that had a batch, in rank order, on rank 0. The
/// others get none. `mine` is this rank's output.
///
/// # Collective
/// The data-parallel ranks that rank 0 is among; each sends its output to rank 0.
pub(crate) fn gathered<T: RankOutput>(
    mine: Option<T>,
    groups: &ProcessGroups,
    device: &Device,
) -> Result<Vec<T>, CollectiveError> {
    let dp = &groups.dp;
    // The other ranks of a tensor-parallel group have the same outputs.
    if dp.members()[0] != 0 {
        return Ok(Vec::new());
    }
    if dp.size() == 1 {
        return Ok(mine.into_iter().collect());
    }
    let is_main = groups.is_main();
    let (own, sent) = if is_main { (mine, None) } else { (None, mine) };
    let mut parts = vec![packed(None); dp.size()];
    parts[0] = packed(sent.map(RankOutput::into_data));
    let parts = dp.all_to_all(parts)?;
    if !is_main {
        return Ok(Vec::new());
    }
    let others = parts.iter().skip(1).filter_map(|part| {
        let data = unpacked(part.as_bytes());
        data.map(|data| T::from_data(data, device))
    });
    Ok(own.into_iter().chain(others).collect())
}

/// The tensors of an output in one row of bytes: the number of bytes of the types and shapes, these as
/// JSON, and the values. Without an output there are no bytes.
fn packed(data: Option<Vec<TensorData>>) -> TensorData {
    let mut bytes = Vec::new();
    if let Some(data) = data {
        let header: Vec<(DType, Vec<usize>)> = data
            .iter()
            .map(|tensor| (tensor.dtype(), tensor.shape().to_vec()))
            .collect();
        let header = serde_json::to_vec(&header).expect("types and shapes are serializable");
        bytes.extend((header.len() as u64).to_le_bytes());
        bytes.extend(header);
        data.iter()
            .for_each(|tensor| bytes.extend_from_slice(tensor.as_bytes()));
    }
    let len = bytes.len();
    TensorData::from_bytes_vec(bytes, [len], DType::U8)
}

fn unpacked(bytes: &[u8]) -> Option<Vec<TensorData>> {
    let (len, rest) = bytes.split_first_chunk()?;
    let (header, mut values) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let header: Vec<(DType, Vec<usize>)> =
        serde_json::from_slice(header).expect("it was written by a rank of the same build");
    let data = header.into_iter().map(|(dtype, shape)| {
        let shape = Shape::from(shape);
        let (mine, others) = values.split_at(shape.num_elements() * dtype.size());
        values = others;
        TensorData::from_bytes_vec(mine.to_vec(), shape, dtype)
    });
    Some(data.collect())
}

/// The place of a step's outputs in an epoch.
#[derive(Clone)]
pub(crate) struct Place {
    /// Number of items that all ranks have processed.
    pub(crate) done: usize,
    pub(crate) total: usize,
    /// Number of batches that all ranks have processed.
    pub(crate) batches: usize,
    pub(crate) lr: Option<ModuleLearningRate>,
}

/// The event of one output.
pub(crate) fn processed<T>(item: T, place: &Place) -> LearnerEvent<T> {
    let unit = Some("items".to_owned());
    let progress = Progress::new(place.done, place.total, unit);
    let batches = Some(place.batches);
    LearnerEvent::ProcessedItem(TrainingItem::new(item, progress, batches, place.lr.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_all_types_and_shapes_arrive_as_they_were_sent() {
        let sent = vec![
            TensorData::from([1.5f32]),
            TensorData::from([[1i64, -2], [3, 4], [5, i64::MIN]]),
            TensorData::from_bytes_vec(Vec::new(), [0, 7], DType::F32),
            TensorData::from([true, false]),
        ];
        for output in [Some(sent), Some(Vec::new()), None] {
            assert_eq!(unpacked(packed(output.clone()).as_bytes()), output);
        }
    }
}
