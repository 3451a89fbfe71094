//! The permutation that sorts assignments by expert.
//!
//! Source: Megatron-LM `megatron/core/transformer/moe/moe_utils.py`, `permute`;
//! `token_dispatcher.py`, `MoEAlltoAllTokenDispatcher.preprocess`.

#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod reference;

use burn::tensor::{Int, Tensor};
use megaburn_autograd::arg_check::{self, int};

/// The permutation of the `k` assignments ("slots") of each of `t` tokens that sorts them by
/// expert, stably. All tensors are on the device, in i32.
#[derive(Clone, Debug)]
pub struct ExpertPermutation {
    /// The number of rows of each expert, `[e]`.
    pub counts: Tensor<1, Int>,
    /// The slot of each row, `[t * k]`; after the rows come the slots without an expert, in order.
    pub slots: Tensor<1, Int>,
    /// The token of each of `slots`, `[t * k]`: the index for [`permute`](crate::permute).
    pub tokens: Tensor<1, Int>,
    /// The row of each slot, `[t, k]`: the index for [`unpermute`](crate::unpermute). A slot
    /// without an expert has the total number of rows here.
    pub rows: Tensor<2, Int>,
}

/// The most experts: a kernel keeps a counter for each in shared memory.
const MOST_EXPERTS: usize = 4096;

/// Sorts slots by their expert. A number that is not an expert, such as -1, marks a dropped slot,
/// which gets no row.
///
/// # Shapes
/// `experts`: `[t, k]`; results: see [`ExpertPermutation`]
///
/// # Panics
/// If there are no or more than 4096 experts, or too many slots for 32 bits.
pub fn permutation_by_expert(experts: Tensor<2, Int>, num_experts: usize) -> ExpertPermutation {
    arg_check::check("permutation_by_expert", [int("experts", &experts)]);
    let [t, k] = experts.dims();
    assert!(
        (1..=MOST_EXPERTS).contains(&num_experts) && t * k < i32::MAX as usize,
        "permutation_by_expert: {num_experts} experts for {t} tokens with top_k {k}: the number \
        of experts must be between 1 and {MOST_EXPERTS}, and slots must fit in 32 bits"
    );
    #[cfg(feature = "cuda")]
    if t * k > 0 && super::launch::ints_on_gpu(&experts) {
        return launch::permutation_by_expert(experts, num_experts);
    }
    reference::permutation_by_expert(experts, num_experts)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, TensorData};
    use megaburn_autograd::testing::{assert_refused, device};
    use rstest::rstest;

    use super::*;

    fn of<const D: usize>(x: Tensor<D, Int>) -> Vec<i64> {
        assert_eq!(x.dtype(), DType::I32);
        x.into_data().iter::<i64>().collect()
    }

    fn experts(of: &[i64], shape: [usize; 2]) -> Tensor<2, Int> {
        Tensor::from_data(
            TensorData::new(of.to_vec(), shape),
            (&device().inner(), DType::I64),
        )
    }

    #[test]
    fn slots_are_in_the_order_of_their_experts_and_dropped_ones_behind() {
        // Three tokens with two of three experts each.
        let all = permutation_by_expert(experts(&[2, 0, 1, -1, 0, 2], [3, 2]), 3);
        assert_eq!(of(all.counts), [2, 1, 2]);
        assert_eq!(of(all.slots), [1, 4, 2, 0, 5, 3]);
        assert_eq!(of(all.tokens), [0, 2, 1, 0, 2, 1]);
        assert_eq!(
            (all.rows.dims(), of(all.rows)),
            ([3, 2], vec![3, 0, 2, 5, 1, 4])
        );
    }

    #[rstest]
    fn the_order_is_that_of_a_stable_sort(
        #[values(1, 8, 60)] num_experts: usize,
        #[values([0, 1], [5, 2], [301, 3])] shape: [usize; 2],
    ) {
        // The last number is not an expert.
        let expert = |slot: usize| (slot * slot + slot / 7) % (num_experts + 1);
        let mut order: Vec<usize> = (0..shape[0] * shape[1]).collect();
        let numbers: Vec<i64> = order.iter().map(|&slot| expert(slot) as i64).collect();
        order.sort_by_key(|&slot| expert(slot));
        let all = permutation_by_expert(experts(&numbers, shape), num_experts);
        let count = |e: usize| order.iter().filter(|&&slot| expert(slot) == e).count() as i64;
        let counts: Vec<i64> = (0..num_experts).map(count).collect();
        let num_rows = counts.iter().sum::<i64>();
        assert_eq!(of(all.counts), counts);
        let numbers = |f: fn(usize, usize) -> usize| {
            order
                .iter()
                .map(|&slot| f(slot, shape[1]) as i64)
                .collect::<Vec<_>>()
        };
        assert_eq!(of(all.slots), numbers(|slot, _| slot));
        assert_eq!(of(all.tokens), numbers(|slot, k| slot / k));
        let rows = of(all.rows);
        for (row, &slot) in order.iter().enumerate() {
            assert_eq!(rows[slot], num_rows.min(row as i64));
        }
    }

    #[rstest]
    #[case(&[-1, 3, 1 << 32, i64::MAX], [2, 2])]
    #[case(&[], [0, 2])]
    #[case(&[7], [1, 1])]
    fn numbers_of_no_expert_have_no_row(#[case] numbers: &[i64], #[case] shape: [usize; 2]) {
        let [t, k] = shape;
        let all = permutation_by_expert(experts(numbers, [t, k]), 3);
        assert_eq!(of(all.counts), [0; 3]);
        assert_eq!(of(all.slots), (0..numbers.len() as i64).collect::<Vec<_>>());
        assert_eq!((all.tokens.dims(), all.rows.dims()), ([t * k], [t, k]));
        assert_eq!(of(all.rows), vec![0; t * k]);
    }

    #[rstest]
    #[case(0)]
    #[case(4097)]
    fn no_experts_and_too_many_are_refused(#[case] num_experts: usize) {
        let message = format!(
            "permutation_by_expert: {num_experts} experts for 1 tokens with \
                              top_k 2"
        );
        assert_refused(
            || permutation_by_expert(experts(&[0, 0], [1, 2]), num_experts),
            &message,
        );
    }
}
