use burn::{
    module::Param,
    tensor::{DType, Tensor},
};
use megaburn_collective::Group;

use super::adapter::ShardedAdapter;

/// The value of a weight for products: with its adapter, and dequantised. The ranks of `group`
/// split the weight, or hold copies of it.
///
/// # Panics
/// If Burn's `apply_lora` adapted a shard or a copy: its factors would differ between ranks that
/// need the same, and their gradients would not be summed.
pub(crate) fn weight_value(weight: &Param<Tensor<2>>, group: &Group) -> Tensor<2> {
    assert!(
        group.size() == 1 || weight.adapter().is_none(),
        "Burn's `apply_lora` does not know that a weight is a shard or a copy in group {}: use \
        `megaburn::parallel::ShardedLora`",
        group.name()
    );
    let value = weight.val();
    match value.dtype() {
        DType::QFloat(_) => value.dequantize(),
        _ => value,
    }
}

/// As [`weight_value`], for products with an input of type `dtype`. A quantised weight, which
/// dequantises to f32, is cast to it.
pub(crate) fn weight_value_as(weight: &Param<Tensor<2>>, group: &Group, dtype: DType) -> Tensor<2> {
    let value = weight_value(weight, group);
    match weight.base().dtype() {
        DType::QFloat(_) if value.dtype() != dtype => value.cast(dtype),
        _ => value,
    }
}

/// Whether the weight is computed from factors, which get its gradient.
pub(crate) fn is_adapted(weight: &Param<Tensor<2>>) -> bool {
    weight.reparameterization::<ShardedAdapter>().is_some()
}
