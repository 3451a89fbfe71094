use cubecl::prelude::*;

use super::factor_of;

/// The compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::optimizer) struct SgdVariant {
    pub(in crate::optimizer) decays: bool,
    /// Whether there is a momentum buffer.
    pub(in crate::optimizer) momentum: bool,
    pub(in crate::optimizer) nesterov: bool,
    /// Whether there is a rounded parameter.
    pub(in crate::optimizer) rounds: bool,
    /// Whether there is a factor on the device.
    pub(in crate::optimizer) scales: bool,
}

/// The numbers of a step.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(in crate::optimizer) struct SgdNumbers {
    pub(in crate::optimizer) grad_factor: f32,
    pub(in crate::optimizer) momentum: f32,
    pub(in crate::optimizer) weight_decay: f32,
    pub(in crate::optimizer) lr: f32,
}

/// One SGD step. Buffers that the variant does not use are not read.
#[cube(launch)]
#[allow(
    clippy::too_many_arguments,
    reason = "the buffers of the optimizer state"
)]
pub(in crate::optimizer) fn sgd_kernel<G: Float, P: Float, B: Float, R: Float, N: Size>(
    grad: &[Vector<G, N>],
    param: &mut [Vector<P, N>],
    momentum_buffer: &mut [Vector<B, N>],
    rounded: &mut [Vector<R, N>],
    factor: &[f32],
    vectors: usize,
    numbers: SgdNumbers,
    #[comptime] variant: SgdVariant,
    #[define(G, P, B, R)] _dtypes: [ElemType; 4],
) {
    if ABSOLUTE_POS < vectors {
        let (grad_factor, goes) = factor_of(numbers.grad_factor, factor, variant.scales);
        let mut p = Vector::<f32, N>::cast_from(param[ABSOLUTE_POS]);
        if goes {
            let mut update = Vector::cast_from(grad[ABSOLUTE_POS]) * Vector::new(grad_factor);
            if comptime!(variant.decays) {
                update += p * Vector::new(numbers.weight_decay);
            }
            if comptime!(variant.momentum) {
                let old = Vector::<f32, N>::cast_from(momentum_buffer[ABSOLUTE_POS]);
                let buffer = old * Vector::new(numbers.momentum) + update;
                momentum_buffer[ABSOLUTE_POS] = Vector::cast_from(buffer);
                if comptime!(variant.nesterov) {
                    update += buffer * Vector::new(numbers.momentum);
                } else {
                    update = buffer;
                }
            }
            p -= update * Vector::new(numbers.lr);
            param[ABSOLUTE_POS] = Vector::cast_from(p);
        }
        if comptime!(variant.rounds) {
            rounded[ABSOLUTE_POS] = Vector::cast_from(p);
        }
    }
}
