//! The bytes of experts that are split over ranks.

use std::{
    convert::Infallible,
    sync::{Barrier, PoisonError},
};

use burn::{
    prelude::Device,
    tensor::{Tensor, TensorData},
};
use megaburn_collective::{GroupOptions, ProcessGroups, run_threads};
use megaburn_mesh::Layout;
use megaburn_parallel::{BatchContext, MoeConfig, MoeOptions};

use super::{ALONE, live};

/// The bytes that all ranks together hold after a layer with expert parallelism, and the load of
/// the experts. Each rank's tokens are noise plus `factor` times a common token.
fn held_by_experts(factor: f32) -> (usize, Vec<u64>) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let barrier = Barrier::new(2);
    let layout = "dp2-ep2".parse::<Layout>().unwrap();
    let options = GroupOptions {
        seed: 3,
        ..GroupOptions::default()
    };
    let ranks = run_threads(2, options, |world| {
        let device = Device::flex().autodiff();
        let groups = ProcessGroups::new(&world, layout).unwrap();
        let config = MoeConfig::new(64, 96, 8, 2).with_name("moe");
        let layer = config
            .init(&groups, MoeOptions::default(), &device)
            .unwrap();
        let noise = |i: usize| ((i * 7919 + world.rank() * 104_729) % 1009) as f32 / 1009.0 - 0.5;
        let x = (0..256 * 64).map(|i| noise(i) + factor * ((i % 64) as f32 / 32.0 - 1.0));
        let x = TensorData::new(x.collect::<Vec<_>>(), [256, 1, 64]);
        let x = Tensor::<3>::from_data(x, &device).require_grad();
        let context = BatchContext {
            loss_factor: Some(1.0),
            ..BatchContext::default()
        };
        let forward = || layer.forward(x.clone(), &context);
        drop(forward().sum().backward());
        layer.router.load().take().unwrap();
        barrier.wait();
        let before = live();
        barrier.wait();
        let y = forward();
        barrier.wait();
        let held = live() - before;
        barrier.wait();
        drop(y.sum().backward());
        Ok::<_, Infallible>((held, layer.router.load().take().unwrap().tokens))
    });
    ranks.into_iter().next().unwrap().unwrap()
}

/// No tensor is padded to the size of the busiest expert for every expert.
#[test]
fn where_all_tokens_go_to_the_same_experts_ranks_together_hold_no_more() {
    let (level, level_load) = held_by_experts(0.0);
    let (same, same_load) = held_by_experts(100.0);
    let busy = |load: &[u64]| load.iter().filter(|&&tokens| tokens > 0).count();
    assert_eq!(
        (busy(&level_load), busy(&same_load)),
        (8, 2),
        "{level_load:?} {same_load:?}"
    );
    let off = same as f64 / level as f64 - 1.0;
    assert!(
        off.abs() < 0.02,
        "{same} bytes held, {level} where tokens go to all experts ({off:+.3})"
    );
}
