//! The permutation by its definition: a stable counting sort, on the host.

use burn::tensor::{DType, Int, Tensor, TensorData};

use super::ExpertPermutation;

pub(super) fn permutation_by_expert(
    experts: Tensor<2, Int>,
    num_experts: usize,
) -> ExpertPermutation {
    let [t, k] = experts.dims();
    let device = experts.device();
    // Assignments without an expert go to an extra bucket after the last expert.
    let bucket = |expert: i64| usize::try_from(expert).map_or(num_experts, |e| e.min(num_experts));
    let buckets: Vec<usize> = experts.into_data().iter::<i64>().map(bucket).collect();
    let mut counts = vec![0; num_experts + 1];
    buckets.iter().for_each(|&bucket| counts[bucket] += 1);
    let starts = counts.iter().scan(0, |end, count| {
        let start = *end;
        *end += count;
        Some(start)
    });
    let mut next: Vec<usize> = starts.collect();
    let num_rows = next[num_experts];
    let mut slots = vec![0; t * k];
    let row_of = |(slot, &bucket): (usize, &usize)| {
        let row = next[bucket];
        next[bucket] += 1;
        slots[row] = slot;
        row.min(num_rows)
    };
    let rows: Vec<usize> = buckets.iter().enumerate().map(row_of).collect();
    let tokens: Vec<usize> = slots.iter().map(|slot| slot / k).collect();
    let numbers = |of: &[usize]| -> Vec<i32> { of.iter().map(|&number| number as i32).collect() };
    let line = |of: &[usize]| {
        Tensor::<1, Int>::from_data(
            TensorData::new(numbers(of), [of.len()]),
            (&device, DType::I32),
        )
    };
    ExpertPermutation {
        counts: line(&counts[..num_experts]),
        slots: line(&slots),
        tokens: line(&tokens),
        rows: Tensor::from_data(
            TensorData::new(numbers(&rows), [t, k]),
            (&device, DType::I32),
        ),
    }
}
