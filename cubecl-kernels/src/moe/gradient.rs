use burn::tensor::Tensor;
use megaburn_autograd::CheckpointOperands;
use megaburn_autograd::backend_ops::as_row;

/// Returns `x` unchanged and adds `gradient` to its gradient in the backward pass: the gradient of
/// a loss that is not part of the summed loss (Megatron's `MoEAuxLossAutoScaler`). On a device
/// without autodiff it only returns `x`.
///
/// # Shapes
/// `x` and result: `[m, n]`; `gradient`: the same or broadcastable to it, off the autodiff device
pub(crate) fn with_gradient(x: Tensor<2>, gradient: Tensor<2>) -> Tensor<2> {
    let device = x.device();
    if !device.is_autodiff() {
        return x;
    }
    let shape = x.dims();
    let value = Tensor::from_inner(x.clone().inner());
    let mut operands = CheckpointOperands::new(&device);
    operands.add(x);
    let [y] = operands.results([value], move |[dy]| {
        let dy: Tensor<2> = dy.expect("the result has a gradient");
        let sum = dy.clone() + gradient.cast(dy.dtype()).expand(shape);
        vec![Some(as_row(sum))]
    });
    y
}

#[cfg(test)]
mod tests {
    use megaburn_autograd::testing::{assert_close, constant, leaf, values};

    use super::*;

    #[test]
    fn the_gradient_of_another_loss_is_added() {
        for shape in [[3, 4], [1, 7]] {
            let x = leaf(constant(shape));
            let other = constant([1, shape[1]]);
            let y = with_gradient(x.clone(), other.clone().inner());
            assert_eq!(values(y.clone().inner()), values(x.clone().inner()));
            let found = x.grad(&(y.sin() * 2.0).sum().backward()).unwrap();
            let x = x.inner();
            let plain = other.inner();
            assert_close(found, x.cos() * 2.0 + plain, 1e-6);
        }
    }
}
