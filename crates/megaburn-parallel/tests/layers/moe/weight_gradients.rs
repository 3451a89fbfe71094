//! Weight gradients of experts: computed while the rows' gradients are sent back, or deferred.

use burn::tensor::{DType, Tensor};
use megaburn_autograd::WgradQueue;
use megaburn_parallel::{BatchContext, Dispatcher, main_grads};
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
    #[values(false, true)] is_deferred: bool,
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
            let y = layer.forward(x, &BatchContext::default());
            let weight = Tensor::<3>::from_data(own("weight"), &y.device());
            (y * weight).sum().backward()
        };
        let expected = param_grads(&layer, &backward());
        let sums = main_grads(&layer);
        sums.values().for_each(|sum| sum.attach());
        if is_deferred {
            let deferred = WgradQueue::default();
            drop(deferred.defer(backward));
            assert!(sums.values().all(|sum| sum.take().is_none()));
            deferred.compute();
        } else {
            drop(backward());
        }
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
