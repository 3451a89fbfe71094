//! An ordinary Burn program: its own module, Burn's AdamW, its own loop.

use burn::{
    module::Module,
    nn,
    optim::{AdamWConfig, GradientsParams},
    tensor::{Tensor, activation::relu},
};
use megaburn_collective::Group;
use megaburn_parallel::{ParallelLinear, ParallelLinearConfig};

use crate::support::{autodiff, fresh_seed, leaf, normal, on_ranks};

trait Network: Module {
    fn predict(&self, x: Tensor<2>) -> Tensor<2>;
}

#[derive(Module, Debug)]
struct Parallel {
    up: ParallelLinear,
    down: ParallelLinear,
}

impl Parallel {
    fn new(group: &Group) -> Self {
        let up = ParallelLinearConfig::column(5, 24).with_name("up");
        let down = ParallelLinearConfig::row(24, 3).with_name("down");
        Self {
            up: up.init(group, &autodiff()).unwrap(),
            down: down.init(group, &autodiff()).unwrap(),
        }
    }
}

impl Network for Parallel {
    fn predict(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(relu(self.up.forward(x)))
    }
}

#[derive(Module, Debug)]
struct Plain {
    up: nn::Linear,
    down: nn::Linear,
}

impl Network for Plain {
    fn predict(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(relu(self.up.forward(x)))
    }
}

/// The losses of 20 steps on one batch of `y = relu(x a) b`.
fn train<N: Network>(mut model: N, seed: u64) -> Vec<f32> {
    let mut optimizer = AdamWConfig::new().with_weight_decay(0.01).init();
    let constant =
        |shape: [usize; 2], what| Tensor::<2>::from_data(normal(&shape, seed, what), &autodiff());
    let x = constant([17, 5], "x");
    let y = relu(x.clone().matmul(constant([5, 4], "a"))).matmul(constant([4, 3], "b"));
    let mut losses = Vec::new();
    for _ in 0..20 {
        let loss = (model.predict(x.clone()) - y.clone()).square().mean();
        losses.push(loss.clone().into_scalar::<f32>());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model, grads);
    }
    losses
}

#[test]
fn a_burn_program_reaches_the_same_losses_on_any_number_of_ranks() {
    let seed = fresh_seed();
    let losses = |ranks| on_ranks(ranks, seed, |group| train(Parallel::new(&group), seed));
    let one = losses(1).remove(0);
    assert!(one[19] < 0.9 * one[0], "{one:?}");
    for ranks in [2, 4] {
        for many in losses(ranks) {
            for (step, (a, b)) in many.iter().zip(&one).enumerate() {
                assert!(
                    (a - b).abs() <= 1e-6 * b.abs().max(1.0),
                    "{ranks} ranks, step {step}: {a} {b}"
                );
            }
        }
    }

    // In a group of one, the program equals the one with Burn's `Linear` bit for bit.
    let parallel = Parallel::new(&Group::single(seed));
    let copy = |ours: &ParallelLinear| {
        let [d_input, d_output] = ours.weight.dims();
        let mut linear = nn::LinearConfig::new(d_input, d_output).init(&autodiff());
        linear.weight = linear.weight.map(|_| leaf(ours.weight.val().into_data()));
        let bias = ours.bias.as_ref().unwrap().val().into_data();
        linear.bias = linear.bias.map(|old| old.map(|_| leaf(bias)));
        linear
    };
    let plain = Plain {
        up: copy(&parallel.up),
        down: copy(&parallel.down),
    };
    assert_eq!(train(plain, seed), one);
}
