//! The ranks by their definition, found on the host.

use burn::tensor::{DType, Int, Tensor, TensorData};

pub(super) fn ep_ranks_of_experts(experts: Tensor<2, Int>, of_rank: usize) -> Tensor<2, Int> {
    let [t, k] = experts.dims();
    let device = experts.device();
    let rank = |expert: i64| match expert {
        0.. => (expert / of_rank as i64) as i32,
        _ => -1,
    };
    let mut ranks: Vec<i32> = experts.into_data().iter::<i64>().map(rank).collect();
    for of_token in ranks.chunks_mut(k.max(1)) {
        for slot in (1..of_token.len()).rev() {
            if of_token[..slot].contains(&of_token[slot]) {
                of_token[slot] = -1;
            }
        }
    }
    Tensor::from_data(TensorData::new(ranks, [t, k]), (&device, DType::I32))
}
