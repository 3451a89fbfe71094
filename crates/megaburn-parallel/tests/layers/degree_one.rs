//! In a group of one, the layers equal plain Burn modules bit for bit.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::{
    module::Module,
    nn,
    tensor::{Tensor, TensorData, activation, module::linear},
};
use megaburn_collective::Group;
use megaburn_parallel::{
    MlpConfig, NormConfig, ParallelLinearConfig, VocabParallelEmbeddingConfig, read_params,
};
use rstest::rstest;

use crate::support::{
    assert_bits, assert_close, autodiff, floats, fresh_seed, leaf, normal, param_grads, tokens,
};

/// Burn's random generator is global to the process, so tests that seed it take turns.
static BURN_SEED: Mutex<()> = Mutex::new(());

fn seeded(seed: u64) -> MutexGuard<'static, ()> {
    let turn = BURN_SEED.lock().unwrap_or_else(PoisonError::into_inner);
    autodiff().seed(seed);
    turn
}

/// The output, the input gradient and the parameter gradients.
fn run<M: Module, const D: usize>(
    module: &M,
    x: &TensorData,
    forward: impl Fn(Tensor<D>) -> Tensor<D>,
) -> Vec<(String, TensorData)> {
    let x = leaf::<D>(x.clone());
    let y = forward(x.clone());
    let weight = normal(&y.dims(), 7, "weight");
    let grads = (y.clone() * Tensor::from_data(weight, &autodiff()))
        .sum()
        .backward();
    let mut all = vec![("output".to_string(), y.into_data())];
    all.push(("input gradient".into(), x.grad(&grads).unwrap().into_data()));
    all.extend(param_grads(module, &grads));
    all
}

fn assert_all_bits(ours: &[(String, TensorData)], burns: &[(String, TensorData)]) {
    assert_eq!(ours.len(), burns.len());
    for ((path, ours), (_, burns)) in ours.iter().zip(burns) {
        assert_bits(path, ours, burns);
    }
}

#[rstest]
#[case::drop_in(ParallelLinearConfig::new(7, 5))]
#[case::column(ParallelLinearConfig::column(8, 12))]
#[case::row(ParallelLinearConfig::row(12, 5))]
#[case::wide(ParallelLinearConfig::row(64, 33))]
fn a_linear_layer_is_burns(
    #[case] config: ParallelLinearConfig,
    #[values(true, false)] bias: bool,
    #[values(true, false)] named: bool,
    #[values(true, false)] sequence_parallel: bool,
    #[values((6, 2), (5, 3))] (seq, batch): (usize, usize),
) {
    let seed = fresh_seed();
    let mut config = config
        .with_bias(bias)
        .with_sequence_parallel(sequence_parallel);
    if named {
        config = config.with_name("layer");
    }
    let burns = nn::LinearConfig::new(config.d_input, config.d_output).with_bias(bias);
    let mut burns = {
        let _turn = seeded(seed);
        let burns = burns.init(&autodiff());
        read_params(&burns); // Burn draws at the first use
        burns
    };
    let ours = {
        let _turn = seeded(seed);
        let ours = config.init(&Group::single(seed), &autodiff()).unwrap();
        read_params(&ours);
        ours
    };
    if named {
        burns.weight = burns.weight.map(|_| ours.weight.val());
        burns.bias = burns
            .bias
            .map(|b| b.map(|_| ours.bias.as_ref().unwrap().val()));
    }
    assert_all_bits(&read_params(&ours), &read_params(&burns));
    let x = normal(&[seq, batch, config.d_input], seed, "input");
    let theirs = run(&burns, &x, |x: Tensor<3>| burns.forward(x));
    let found = run(&ours, &x, |x: Tensor<3>| ours.forward(x));
    assert_all_bits(&found[..2], &theirs[..2]);
    // Burn computes one GEMM per position, and sums the weight's gradient over them, where a single
    // GEMM of all rows would be no squarer. That is the case for some layers of the second shape.
    if (seq, batch) == (6, 2) {
        assert_all_bits(&found, &theirs);
    }
    for ((path, ours), (_, burns)) in found.iter().zip(&theirs) {
        assert_close(path, ours, burns, 1e-6);
    }
    let returned = |x: Tensor<3>| match ours.forward_with_bias(x) {
        (y, Some(bias)) => y + bias.unsqueeze::<3>(),
        (y, None) => y,
    };
    // Burn sums the gradient of a bias that it adds itself in another order.
    for ((path, ours), (_, burns)) in run(&ours, &x, returned).iter().zip(&theirs) {
        assert_close(path, ours, burns, 1e-6);
    }
}

#[rstest]
fn an_embedding_is_burns(
    #[values(true, false)] named: bool,
    #[values(1, 8, 128)] pad_multiple: usize,
    #[values([6, 2], [5, 3])] shape: [usize; 2],
) {
    let seed = fresh_seed();
    let vocab = 13;
    let d_model = 5;
    let mut config =
        VocabParallelEmbeddingConfig::new(vocab, d_model).with_pad_multiple(pad_multiple);
    if named {
        config = config.with_name("embedding");
    }
    let burns =
        nn::EmbeddingConfig::new(vocab, d_model).with_initializer(config.initializer.clone());
    let mut burns = {
        let _turn = seeded(seed);
        let burns = burns.init(&autodiff());
        read_params(&burns);
        burns
    };
    let ours = {
        let _turn = seeded(seed);
        let ours = config.init(&Group::single(seed), &autodiff()).unwrap();
        read_params(&ours);
        ours
    };
    let real_rows = |data: TensorData| {
        let all = floats(&data);
        let (real, padding) = all.split_at(vocab * d_model);
        assert!(padding.iter().all(|&value| value == 0.0));
        TensorData::new(real.to_vec(), [vocab, d_model])
    };
    let real = real_rows(ours.weight.val().into_data());
    if named {
        burns.weight = burns.weight.map(|_| leaf(real.clone()));
    }
    assert_bits("weight", &real, &burns.weight.val().into_data());
    let ids = tokens(shape, vocab, seed, "ids");
    let run = |forward: &dyn Fn(Tensor<2, burn::tensor::Int>) -> Tensor<3>, weight: Tensor<2>| {
        let y = forward(Tensor::from_data(ids.clone(), &autodiff()));
        let scale = Tensor::from_data(normal(&y.dims(), seed, "weight"), &autodiff());
        let grads = (y.clone() * scale).sum().backward();
        (y.into_data(), weight.grad(&grads).unwrap().into_data())
    };
    let (y, grad) = run(&|ids| ours.forward(ids), ours.weight.val());
    let (burn_y, burn_grad) = run(&|ids| burns.forward(ids), burns.weight.val());
    assert_bits("output", &y, &burn_y);
    assert_bits("gradient", &real_rows(grad), &burn_grad);
}

#[rstest]
fn norms_are_burns(#[values([6, 2, 8], [5, 3, 7], [1, 1, 33])] shape: [usize; 3]) {
    let seed = fresh_seed();
    let group = Group::single(seed);
    let x = normal(&shape, seed, "input");
    let gamma = normal(&shape[2..], seed, "gamma");
    let beta = normal(&shape[2..], seed, "beta");
    let compare = |ours: Vec<(String, TensorData)>, burns: Vec<(String, TensorData)>| {
        assert_eq!(ours.len(), burns.len());
        assert_bits("output", &ours[0].1, &burns[0].1);
        // The handwritten backward sums in another order.
        for ((path, ours), (_, burns)) in ours.iter().zip(&burns) {
            assert_close(path, ours, burns, 1e-6);
        }
    };

    let mut ours = NormConfig::rms(shape[2]).init(&group, &autodiff());
    ours.gamma = ours.gamma.map(|_| leaf(gamma.clone()));
    let mut burns = nn::RmsNormConfig::new(shape[2])
        .with_epsilon(1e-5)
        .init(&autodiff());
    burns.gamma = burns.gamma.map(|_| leaf(gamma.clone()));
    compare(
        run(&ours, &x, |x: Tensor<3>| ours.forward(x)),
        run(&burns, &x, |x: Tensor<3>| burns.forward(x)),
    );

    for bias in [true, false] {
        let mut ours = NormConfig::layer(shape[2])
            .with_bias(bias)
            .init(&group, &autodiff());
        ours.gamma = ours.gamma.map(|_| leaf(gamma.clone()));
        ours.beta = ours.beta.map(|b| b.map(|_| leaf(beta.clone())));
        let mut burns = nn::LayerNormConfig::new(shape[2])
            .with_bias(bias)
            .init(&autodiff());
        burns.gamma = burns.gamma.map(|_| leaf(gamma.clone()));
        burns.beta = burns.beta.map(|b| b.map(|_| leaf(beta.clone())));
        compare(
            run(&ours, &x, |x: Tensor<3>| ours.forward(x)),
            run(&burns, &x, |x: Tensor<3>| burns.forward(x)),
        );
    }
}

#[rstest]
fn a_gated_mlp_is_silu_of_the_gate_times_up(
    #[values([6, 2, 8, 12], [5, 3, 7, 9])] sizes: [usize; 4],
) {
    let [seq, batch, hidden, ffn] = sizes;
    let seed = fresh_seed();
    let config = MlpConfig::gated(hidden, ffn).with_name("mlp");
    let ours = config.init(&Group::single(seed), &autodiff()).unwrap();
    let x = normal(&[seq, batch, hidden], seed, "input");
    let composed = |x: Tensor<3>| {
        let up = linear(x, ours.up.weight.val(), None);
        let [gate, up] = [0, ffn].map(|start| up.clone().narrow(2, start, ffn));
        linear(activation::silu(gate) * up, ours.down.weight.val(), None)
    };
    let fast = run(&ours, &x, |x: Tensor<3>| ours.forward(x));
    for ((path, fast), (_, slow)) in fast.iter().zip(&run(&ours, &x, composed)) {
        assert_close(path, fast, slow, 1e-6);
    }
}
