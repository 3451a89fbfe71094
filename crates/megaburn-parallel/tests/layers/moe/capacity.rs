//! Experts with a limited capacity.

use burn::tensor::{Tensor, activation};
use megaburn_mesh::Layout;
use megaburn_parallel::{
    BatchContext, Capacity, CapacityScope, Dispatcher, DropPolicy, ExpertGroups,
};
use rstest::rstest;

use super::{
    GRIDS,
    case::{Case, assert_same, deepseek, mixtral},
};
use crate::support::{assert_close, autodiff, floats, fresh_seed, leaf, on_ranks};

fn capacity(factor: f64, policy: DropPolicy, scope: CapacityScope, pad: bool) -> Option<Capacity> {
    Some(Capacity {
        factor,
        policy,
        scope,
        pad,
    })
}

/// Applies only the experts that have capacity for the token.
#[rstest]
fn an_expert_takes_what_its_capacity_says(
    #[values(0.5, 1.0, 1.3)] factor: f64,
    #[values(DropPolicy::Probs, DropPolicy::Position)] policy: DropPolicy,
    #[values(CapacityScope::Sequence, CapacityScope::Rank)] scope: CapacityScope,
    #[values(false, true)] pad: bool,
    #[values([6, 2, 8], [5, 3, 7])] shape: [usize; 3],
) {
    let [seq, batch, d] = shape;
    let experts = 4;
    let top_k = 2;
    let config = mixtral(d, 4, experts, top_k);
    let case = Case {
        capacity: capacity(factor, policy, scope, pad),
        common: 2.0,
        ..Case::new(shape, config)
    };
    // Among nearly equal weights at the limit the layer chooses by another rule than the largest
    // weight, so inputs that have some are drawn again.
    let is_checked = (0..20).any(|_| {
        let seed = fresh_seed();
        on_ranks(1, seed, |world| {
            let layer = case.build(ExpertGroups::from(&world));
            let x = leaf::<3>(case.input(seed));
            let context = BatchContext {
                loss_factor: Some(1.0),
                ..BatchContext::default()
            };
            let found = layer.forward(x.clone(), &context);
            let load = layer.router.load().take().unwrap();

            let rows = x.clone().reshape([seq * batch, d]);
            let scores = activation::softmax(rows.clone().matmul(layer.router.weight.val()), 1);
            let plain = floats(&scores.inner().into_data());
            // Sequence (0 if counted per rank), expert, weight, token.
            let mut all = Vec::new();
            for (token, scores) in plain.chunks(experts).enumerate() {
                let mut order: Vec<usize> = (0..experts).collect();
                order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
                let sum: f32 = order[..top_k].iter().map(|e| scores[*e]).sum();
                for &expert in &order[..top_k] {
                    let of = if scope == CapacityScope::Rank {
                        0
                    } else {
                        token % batch
                    };
                    all.push((of, expert, scores[expert] / sum, token));
                }
            }
            let tokens = if scope == CapacityScope::Rank {
                seq * batch
            } else {
                seq
            };
            let takes = (factor * (tokens * top_k) as f64 / experts as f64).ceil() as usize;
            let mut out = Tensor::<2>::zeros([seq * batch, d], &autodiff());
            let mut dropped = 0;
            for (of, expert) in (0..batch).flat_map(|of| (0..experts).map(move |e| (of, e))) {
                let mut queue: Vec<_> = all.iter().filter(|c| (c.0, c.1) == (of, expert)).collect();
                match policy {
                    DropPolicy::Probs => {
                        queue.sort_by(|a, b| b.2.total_cmp(&a.2).then(a.3.cmp(&b.3)))
                    }
                    DropPolicy::Position => queue.sort_by_key(|c| c.3),
                }
                let limit = queue.get(takes - 1).zip(queue.get(takes));
                let is_near_tie = limit.is_some_and(|(last, next)| last.2 - next.2 < 1e-3);
                if policy == DropPolicy::Probs && is_near_tie {
                    return false;
                }
                dropped += queue.len().saturating_sub(takes) as u64;
                for &&(_, _, weight, token) in queue.iter().take(takes) {
                    let own = layer.experts[expert].as_ref().unwrap();
                    let up = rows.clone().narrow(0, token, 1).matmul(own.up.weight.val());
                    let [gate, up] = up.chunk(2, 1).try_into().unwrap();
                    let y = (activation::silu(gate) * up).matmul(own.down.weight.val()) * weight;
                    let sum = out.clone().narrow(0, token, 1) + y;
                    out = out.slice_assign([token..token + 1, 0..d], sum);
                }
            }
            let expected = out.reshape(shape).inner().into_data();
            assert_close("output", &found.inner().into_data(), &expected, 1e-5);
            assert_eq!(load.dropped, dropped);
            assert_eq!(
                load.tokens.iter().sum::<u64>() as usize,
                seq * batch * top_k
            );
            assert!(factor > 0.5 || dropped > 0);
            true
        })[0]
    });
    assert!(is_checked, "each of 20 inputs had nearly equal weights");
}

#[rstest]
fn the_same_tokens_are_dropped_under_every_grid(
    #[values(false, true)] is_deepseek: bool,
    #[values(DropPolicy::Probs, DropPolicy::Position)] policy: DropPolicy,
    #[values(false, true)] pad: bool,
    #[values(Dispatcher::AllToAll, Dispatcher::AllGather)] dispatcher: Dispatcher,
) {
    let config = if is_deepseek {
        deepseek(6, 4)
    } else {
        mixtral(8, 4, 4, 2)
    };
    let case = Case {
        capacity: capacity(0.8, policy, CapacityScope::Sequence, pad),
        common: 1.0,
        recompute: pad,
        dispatcher,
        ..Case::new([8, 4, config.d_model], config)
    };
    let seed = fresh_seed();
    let expected = case.run("tp1", seed);
    assert!(expected.load.dropped > 0);
    for grid in GRIDS {
        println!("{grid}");
        assert_same(&case.run(grid, seed), &expected, 2e-5);
    }
}

/// As Megatron counts: which tokens are dropped depends only on which rank has which tokens.
#[rstest]
fn tokens_of_a_rank_are_counted_by_themselves(
    #[values("dp2-ep2", "dp4-ep2", "dp4-ep4", "dp2-etp2", "dp4-ep2-etp2")] grid: &str,
    #[values(false, true)] pad: bool,
) {
    let case = Case {
        capacity: capacity(0.8, DropPolicy::Probs, CapacityScope::Rank, pad),
        common: 1.0,
        ..Case::new([6, 4, 8], mixtral(8, 4, 4, 2))
    };
    let seed = fresh_seed();
    let layout = grid.parse::<Layout>().unwrap();
    let expected = case.run(&format!("dp{}", layout.dp), seed);
    assert!(expected.load.dropped > 0);
    assert_same(&case.run(grid, seed), &expected, 2e-5);
}

#[test]
fn generation_drops_nothing() {
    let case = Case {
        capacity: capacity(0.1, DropPolicy::Probs, CapacityScope::Sequence, false),
        ..Case::new([6, 2, 8], mixtral(8, 4, 4, 2))
    };
    on_ranks(1, fresh_seed(), |world| {
        let layer = case.build(ExpertGroups::from(&world));
        let all = Case {
            capacity: None,
            ..case.clone()
        };
        let all = all.build(ExpertGroups::from(&world));
        let x = leaf::<3>(case.input(1));
        let run = |layer: &megaburn_parallel::Moe| {
            floats(
                &layer
                    .forward(x.clone(), &BatchContext::default())
                    .inner()
                    .into_data(),
            )
        };
        assert_ne!(run(&layer), run(&all));
        assert_eq!(run(&layer.clone().whole_sequence()), run(&all));
    });
}
