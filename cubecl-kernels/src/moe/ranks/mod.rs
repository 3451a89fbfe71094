//! The expert-parallel ranks that tokens are sent to.
//!
//! Source: DeepSeek-AI, DeepEP (<https://github.com/deepseek-ai/DeepEP>), and Megatron-LM's flex
//! dispatcher (`megatron/core/transformer/moe/token_dispatcher.py`), which send a token once to
//! each rank.

#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "cuda")]
mod launch;
mod reference;

use burn::tensor::{Int, Tensor};
use megaburn_autograd::arg_check::{self, int};

/// The rank of each slot's expert, where each rank has `of_rank` consecutive experts. Each rank
/// occurs once per token, at the first slot that goes there; later slots of that rank and slots
/// without an expert get -1.
///
/// # Shapes
/// `experts`: `[t, k]`, result `[t, k]` in i32
///
/// # Panics
/// If `of_rank` is 0.
pub fn ep_ranks_of_experts(experts: Tensor<2, Int>, of_rank: usize) -> Tensor<2, Int> {
    arg_check::check("ep_ranks_of_experts", [int("experts", &experts)]);
    assert!(
        of_rank > 0,
        "ep_ranks_of_experts: the number of experts per rank must be at least 1"
    );
    #[cfg(feature = "cuda")]
    if experts.shape().num_elements() > 0 && super::launch::ints_on_gpu(&experts) {
        return launch::ep_ranks_of_experts(experts, of_rank);
    }
    reference::ep_ranks_of_experts(experts, of_rank)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, TensorData};
    use megaburn_autograd::testing::{assert_refused, device};
    use rstest::rstest;

    use super::*;

    fn ranks(experts: &[i64], shape: [usize; 2], of_rank: usize) -> Vec<i64> {
        let experts = TensorData::new(experts.to_vec(), shape);
        let experts = Tensor::from_data(experts, (&device().inner(), DType::I32));
        let found = ep_ranks_of_experts(experts, of_rank);
        assert_eq!((found.dims(), found.dtype()), (shape, DType::I32));
        found.into_data().iter().collect()
    }

    #[rstest]
    #[case(&[0, 3, 1, 5, 4, 2], [2, 3], 2, &[0, 1, -1, 2, -1, 1])]
    #[case(&[-1, 3, -1, 3], [2, 2], 4, &[-1, 0, -1, 0])]
    #[case(&[7, 6, 5, 4], [1, 4], 1, &[7, 6, 5, 4])]
    #[case(&[7, 6, 5, 4], [4, 1], 8, &[0, 0, 0, 0])]
    #[case(&[], [0, 2], 3, &[])]
    fn a_token_goes_once_to_each_rank_of_its_experts(
        #[case] experts: &[i64],
        #[case] shape: [usize; 2],
        #[case] of_rank: usize,
        #[case] expected: &[i64],
    ) {
        assert_eq!(ranks(experts, shape, of_rank), expected);
    }

    #[test]
    fn ranks_without_experts_are_refused() {
        assert_refused(
            || drop(ranks(&[0, 1], [1, 2], 0)),
            "ep_ranks_of_experts: the number of experts per rank must be at least 1",
        );
    }
}
