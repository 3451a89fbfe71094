//! Balancing losses against their formulas, and balanced choices of experts.

use burn::tensor::{Tensor, TensorData, activation};
use megaburn_parallel::{BalanceChoice, BatchContext, ExpertGroups, LoadBalance};
use rstest::rstest;

use super::{
    assert_every_grid_does_what_one_rank_does,
    case::{Case, mixtral},
};
use crate::support::{assert_close, autodiff, floats, fresh_seed, leaf, on_ranks};

#[rstest]
#[case::micro_batch(LoadBalance { aux_loss: 0.7, ..LoadBalance::default() })]
#[case::sequence(LoadBalance { seq_aux_loss: 0.7, ..LoadBalance::default() })]
#[case::global(LoadBalance { global_aux_loss: 0.7, ..LoadBalance::default() })]
#[case::z(LoadBalance { z_loss: 0.7, ..LoadBalance::default() })]
#[case::all(LoadBalance { aux_loss: 0.4, seq_aux_loss: 0.3, global_aux_loss: 0.2, z_loss: 0.1, ..LoadBalance::default() })]
fn balancing_losses_have_the_gradients_of_their_formulas(
    #[case] balance: LoadBalance,
    #[values(false, true)] sigmoid: bool,
    #[values([4, 2, 6], [5, 3, 7])] shape: [usize; 3],
) {
    let [seq, batch, d] = shape;
    let config = mixtral(d, 4, 5, 2).with_sigmoid(sigmoid);
    let case = Case {
        balance,
        ..Case::new(shape, config)
    };
    let experts = 5;
    let factor = 3.0;
    on_ranks(1, fresh_seed(), |world| {
        let layer = case.build(ExpertGroups::from(&world));
        let last = vec![0.5, 0.25, 0.0, 0.05, 0.2];
        layer.router.load().set_last(Some(last.clone()));
        let seed = fresh_seed();
        let run = |balance: LoadBalance, factor: f64| {
            let case = Case {
                balance,
                ..case.clone()
            };
            let layer = case.build(ExpertGroups::from(&world));
            layer.router.load().set_last(Some(last.clone()));
            let x = leaf::<3>(case.input(seed));
            let context = BatchContext {
                loss_factor: Some(factor),
                ..BatchContext::default()
            };
            let grads = layer.forward(x.clone(), &context).sum().backward();
            let router = layer.router.weight.val().grad(&grads).unwrap();
            (
                x.grad(&grads).unwrap(),
                router,
                layer.router.load().take().unwrap(),
            )
        };
        let (x_plain, router_plain, seen) = run(LoadBalance::default(), 1.0);
        let (x_found, router_found, found) = run(balance, factor);
        assert_eq!(seen.tokens, found.tokens);

        // The formulas, for the same choice of experts.
        let x = leaf::<3>(case.input(seed));
        let logits = x
            .clone()
            .reshape([seq * batch, d])
            .matmul(layer.router.weight.val());
        let scores = if sigmoid {
            activation::sigmoid(logits.clone())
        } else {
            activation::softmax(logits.clone(), 1)
        };
        let plain = floats(&scores.clone().inner().into_data());
        let mut counts = vec![0.0f32; batch * experts];
        for (token, scores) in plain.chunks(experts).enumerate() {
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
            order[..2]
                .iter()
                .for_each(|e| counts[token % batch * experts + e] += 1.0);
        }
        let p = scores.clone() / scores.sum_dim(1);
        let p = p
            .reshape([seq, batch, experts])
            .sum_dim(0)
            .reshape([batch, experts]);
        let counts = TensorData::new(counts, [batch, experts]);
        let c = Tensor::<2>::from_data(counts, &autodiff());
        let e = experts as f64;
        let k = 2.0;
        let of = |c: Tensor<2>, p: Tensor<2>, tokens: f64| (c * p).sum() * (e / (k * tokens));
        let aux = of(
            c.clone().sum_dim(0),
            p.clone().sum_dim(0),
            (seq * batch) as f64,
        );
        let seq_aux = of(c, p.clone(), seq as f64);
        let last: Vec<f32> = last.iter().map(|&part| part as f32).collect();
        let last = Tensor::<2>::from_data(TensorData::new(last, [1, experts]), &autodiff());
        // `last` has shares of all assignments; each token has `k` assignments.
        let global = of(last, p.sum_dim(0), 1.0 / k);
        let lse = logits.exp().sum_dim(1).log();
        let z = (lse.clone() * lse).sum();
        let value = |loss: &Tensor<1>| f64::from(floats(&loss.clone().inner().into_data())[0]);
        for (loss, found, weight) in [
            (&aux, found.aux_loss, balance.aux_loss),
            (&seq_aux, found.seq_aux_loss, balance.seq_aux_loss),
            (&z, found.z_loss, balance.z_loss),
        ] {
            let expected = if weight == 0.0 { 0.0 } else { value(loss) };
            assert!(
                (found - expected).abs() <= 1e-5 * expected.abs(),
                "{found} for {expected}"
            );
        }
        let loss = aux * balance.aux_loss
            + seq_aux * balance.seq_aux_loss
            + global * balance.global_aux_loss
            + z * balance.z_loss;
        let grads = (loss * factor).backward();
        let of_x = x.grad(&grads).unwrap() + x_plain;
        let of_router = layer.router.weight.val().grad(&grads).unwrap() + router_plain;
        assert_close("input", &x_found.into_data(), &of_x.into_data(), 1e-5);
        assert_close(
            "router",
            &router_found.into_data(),
            &of_router.into_data(),
            1e-5,
        );
    });
}

/// Sinkhorn scales each micro-batch as one, so that the ranks that share it choose the same
/// experts.
#[rstest]
fn experts_chosen_by_sinkhorn_are_the_same_under_every_grid_and_balanced(
    #[values(false, true)] recompute: bool,
) {
    let balance = LoadBalance {
        choice: BalanceChoice::Sinkhorn,
        ..LoadBalance::default()
    };
    let case = Case {
        balance,
        recompute,
        common: 1.0,
        ..Case::new([16, 4, 8], mixtral(8, 4, 4, 1).with_normalise(false))
    };
    assert_every_grid_does_what_one_rank_does(&case);
}

#[test]
fn sinkhorn_balances_experts_of_which_one_is_liked_best() {
    let case = Case {
        common: 2.0,
        ..Case::new([32, 4, 8], mixtral(8, 4, 4, 1).with_normalise(false))
    };
    let most = |choice| {
        let balance = LoadBalance {
            choice,
            ..LoadBalance::default()
        };
        let done = Case {
            balance,
            ..case.clone()
        }
        .run("dp1", 5);
        *done.load.tokens.iter().max().unwrap()
    };
    let [plain, balanced] = [BalanceChoice::Scores, BalanceChoice::Sinkhorn].map(most);
    println!("{plain} {balanced}");
    // A perfect balance of 128 tokens is 32 per expert.
    assert!(plain > 64 && balanced < 44, "{plain} {balanced}");
}
