//! What is computed beside rows on their way: gradients of experts' weights of the same backward, and products that
//! were put off.

use burn::tensor::{DType, Tensor};
use megaburn_kernels::{Spare, WgradQueue};
use megaburn_parallel::{Dispatcher, TokenContext, main_grads};
use rstest::rstest;

use super::case::{Case, groups, mixtral};
use crate::support::{assert_close, autodiff, fresh_seed, leaf, normal, on_ranks, param_grads};

#[rstest]
fn sums_are_what_ordinary_gradients_are(
    #[values("dp2-ep2", "tp2-ep2-sp", "dp2-etp2", "dp2-ep1")] layout: &str,
    #[values(Dispatcher::AllToAll, Dispatcher::AllGather)] dispatcher: Dispatcher,
    #[values(false, true)] recompute: bool,
    // Where it needs no gradient nothing is sent back to it.
    #[values(false, true)] is_trained_before: bool,
) {
    let case = Case {
        dispatcher,
        recompute,
        ..Case::new([4, 2, 8], mixtral(8, 4, 4, 2))
    };
    let seed = fresh_seed();
    on_ranks(2, seed, |world| {
        let layer = case.build(groups(&world, layout).1);
        let own = |name: &str| normal(&case.shape, seed, &format!("{name} {}", world.rank()));
        let backward = || {
            let x = if is_trained_before {
                leaf::<3>(own("input"))
            } else {
                Tensor::<3>::from_data(own("input"), &autodiff())
            };
            let y = layer.forward(x, &TokenContext::default());
            let weight = Tensor::<3>::from_data(own("weight"), &y.device());
            (y * weight).sum().backward()
        };
        let expected = param_grads(&layer, &backward());
        let sums = main_grads(&layer);
        sums.values().for_each(|sum| sum.attach());
        drop(backward());
        let mut compared = 0;
        for (path, expected) in expected {
            let Some(sum) = sums.get(&path) else { continue };
            let sum = sum.take().unwrap_or_else(|| panic!("{path} has none"));
            assert_eq!(sum.dtype(), DType::F32);
            assert_close(&path, &sum.into_data(), &expected, 1e-6);
            compared += 1;
        }
        assert_eq!(compared, 2 * layer.experts.iter().flatten().count());
    });
}

#[rstest]
#[case("dp2-ep2", Dispatcher::AllToAll, 2)]
#[case("tp2-ep2-sp", Dispatcher::AllToAll, 2)]
#[case("dp2-ep1", Dispatcher::AllToAll, 0)]
#[case("dp2-ep2", Dispatcher::AllGather, 2)]
#[case("dp2-ep1", Dispatcher::AllGather, 0)]
fn passes_wait_twice_and_compute_what_was_put_off(
    #[case] layout: &str,
    #[case] dispatcher: Dispatcher,
    #[case] expected: usize,
    #[values(false, true)] is_trained: bool,
) {
    let case = Case {
        dispatcher,
        ..Case::new([4, 2, 8], mixtral(8, 4, 4, 2))
    };
    let seed = fresh_seed();
    on_ranks(2, seed, |world| {
        let layer = case.build(groups(&world, layout).1);
        let sums = main_grads(&layer);
        sums.values().for_each(|sum| sum.attach());
        let num_given = || sums.values().filter(|sum| sum.take().is_some()).count();
        let all = 2 * layer.experts.iter().flatten().count();
        let input = |name: &str| normal(&case.shape, seed, &format!("{name} {}", world.rank()));
        let x = leaf::<3>(input("input"));
        let put_off = WgradQueue::default();
        let backward = || {
            layer
                .forward(x.clone(), &TokenContext::default())
                .sum()
                .backward()
        };
        put_off.defer(backward);
        assert_eq!(num_given(), 0);
        // Of its first wait, and of its second.
        let share = put_off.size() * 2 / 3;
        let spare = || Spare {
            put_off: vec![put_off.clone()],
            share,
        };
        let other = if is_trained {
            leaf::<3>(input("another"))
        } else {
            Tensor::<3>::from_data(input("another"), &autodiff().inner())
        };
        let (y, waits) = spare().beside_waits_of(|| layer.forward(other, &TokenContext::default()));
        assert_eq!(
            (waits, num_given()),
            (expected, if expected > 0 { all } else { 0 })
        );
        put_off.compute();
        num_given();
        if is_trained {
            put_off.defer(backward);
            // Its own are computed at once.
            let ((), waits) = spare().beside_waits_of(|| drop(y.sum().backward()));
            assert_eq!(waits, expected);
            put_off.compute();
        }
    });
}
