//! Gradient clipping by the global norm.

use burn::Tensor;

use crate::{
    accumulator::GradientAccumulator,
    device_scalar::Value,
    norm::GradNorm,
    skip_nonfinite::{unless_nonfinite, unless_nonfinite_on_gpu},
};

impl GradientAccumulator {
    /// Scales the gradients down to `max_norm` if their `norm` exceeds it; an infinite `max_norm`
    /// never scales. If the norm is not finite, an update from these gradients does nothing
    /// ([`Optimizer::step`](crate::Optimizer::step)).
    ///
    /// On GPUs neither the norm nor the coefficient is copied to the host.
    ///
    /// Source: Megatron-LM `megatron/core/optimizer/clip_grads.py`: `max_norm / (norm + 1e-6)`,
    /// applied if below 1.
    pub fn clip(&mut self, norm: &GradNorm, max_norm: f64) {
        match &norm.squares.value {
            Value::Known(squares) => {
                let norm = squares.sqrt() * norm.factor;
                let coefficient = (max_norm / (norm + 1e-6)).min(1.0);
                self.scale(unless_nonfinite(*squares, coefficient));
            }
            Value::OnGpu(squares) => {
                let norm = squares.clone().sqrt().mul_scalar(norm.factor);
                let coefficient = norm.add_scalar(1e-6).recip().mul_scalar(max_norm);
                let coefficient = coefficient.clamp_max(1.0);
                self.scale_on_gpu(unless_nonfinite_on_gpu(squares, coefficient));
            }
        }
    }

    /// Multiplies the gradients by a coefficient that stays on the GPU.
    pub(crate) fn scale_on_gpu(&mut self, coefficient: Tensor<1>) {
        self.factor_on_gpu = Some(match self.factor_on_gpu.take() {
            Some(factor) => factor * coefficient,
            None => coefficient,
        });
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use megaburn_collective::Group;
    use rstest::rstest;

    use super::*;
    use crate::{
        device_scalar::DeviceScalar,
        rule::AdamWConfig,
        sharding::Sharding,
        testing::{Net, plan_of, values},
    };

    /// A net and its gradient: `of_matrix` for every element of the matrix, zero for the bias.
    fn net(of_matrix: f32) -> (Net, GradientAccumulator) {
        let device = Device::default().autodiff();
        let net = Net::new(2, 2, 0, 1, &device);
        let mut grads =
            GradientAccumulator::new(&net, &plan_of(2, 2, 0, 1), &Sharding::none()).unwrap();
        grads.accumulate(
            &net,
            &mut net.matrix.val().sum().mul_scalar(of_matrix).backward(),
        );
        (net, grads)
    }

    fn norm(grads: &GradientAccumulator, on_gpu: bool) -> GradNorm {
        grads.norm_on(on_gpu).unwrap()
    }

    #[rstest]
    fn clipping_scales_down_to_the_maximum_and_never_up(#[values(false, true)] on_gpu: bool) {
        let (_, mut grads) = net(6.0);
        grads.scale(0.5);
        let norm = norm(&grads, on_gpu);
        assert_eq!(norm.read().unwrap(), 6.0);
        let found = |grads: &GradientAccumulator| values(grads.get("matrix").unwrap());
        for never in [7.0, f64::INFINITY] {
            grads.clip(&norm, never);
            assert_eq!(found(&grads), [3.0; 4]);
        }
        grads.clip(&norm, 1.5);
        found(&grads)
            .iter()
            .for_each(|g| assert!((g - 0.75).abs() < 1e-6, "{g}"));
        grads.reset();
        assert!(grads.factor_on_gpu.is_none() && grads.factor == 1.0);
    }

    #[rstest]
    fn an_update_from_what_is_not_finite_does_nothing(
        #[values(false, true)] on_gpu: bool,
        #[values(f32::NAN, f32::INFINITY)] bad: f32,
        #[values(1.0, f64::INFINITY)] max_norm: f64,
        #[values(false, true)] of_loss: bool,
    ) {
        let (mut net, mut grads) = net(1.0);
        let mut optimizer = AdamWConfig::new().init(&Sharding::none()).unwrap();
        net = optimizer.step(1e-2, net, &grads).unwrap();
        if !of_loss {
            grads.entries.get_mut("bias").unwrap().sum =
                Some(Tensor::from_floats([0.0, bad], &Device::default()));
        }
        let norm = norm(&grads, on_gpu);
        assert_eq!(norm.read().unwrap().is_finite(), of_loss);
        grads.clip(&norm, max_norm);
        if of_loss {
            let group = Group::single(0);
            let loss = Tensor::from_floats([bad], &Device::default());
            let loss = if on_gpu {
                DeviceScalar::on_gpu(loss, &group)
            } else {
                DeviceScalar::of(loss, &group)
            };
            grads.skip_if_not_finite(&loss.unwrap());
        }
        let state = |net: &Net, optimizer: &crate::Optimizer| {
            let moments = optimizer
                .state_tensors()
                .map(|(_, _, tensor)| values(tensor));
            let params = [values(net.matrix.val()), values(net.bias.val())];
            params.into_iter().chain(moments).collect::<Vec<_>>()
        };
        let before = state(&net, &optimizer);
        net = optimizer.step(1e-2, net, &grads).unwrap();
        optimizer.revert_step_count();
        assert_eq!(state(&net, &optimizer), before);
        assert_eq!(optimizer.time(), 1);
    }

    #[rstest]
    fn an_update_from_a_norm_above_the_threshold_does_nothing(
        #[values(false, true)] on_gpu: bool,
        #[values(false, true)] clipped: bool,
    ) {
        // The norm is 3; the threshold is compared in f32.
        for (threshold, is_above) in [(2.999, true), (3.0, false), (3.001, false), (1e30, false)] {
            let (mut net, mut grads) = net(3.0);
            grads.scale(0.5);
            let norm = norm(&grads, on_gpu);
            assert_eq!(
                norm.read_against(threshold).unwrap(),
                (3.0, is_above),
                "{threshold}"
            );
            if clipped {
                grads.clip(&norm, 1.0);
            }
            grads.skip_above(&norm, threshold);
            let before = values(net.matrix.val());
            let mut optimizer = AdamWConfig::new().init(&Sharding::none()).unwrap();
            net = optimizer.step(1e-2, net, &grads).unwrap();
            assert_eq!(values(net.matrix.val()) == before, is_above, "{threshold}");
        }
    }
}
