//! Compares the memory estimate of a rank with what its trainer holds.

use burn::{Tensor, prelude::Device};
use megaburn_checkpoint::{Copies, HeldTensor, WritePlan};
use megaburn_parallel::main_grads;
use rstest::rstest;

use super::{Trainer, testing::trainers};
use crate::estimate::{CheckpointShare, MemoryEstimate, Scores};

/// Numbers of elements that a rank holds.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    /// All parameters.
    parameters: usize,
    /// Accumulated gradients, and those of the parameters that ZeRO-3 may shard.
    gradients: usize,
    of_direct: usize,
    /// Masters.
    masters: usize,
}

impl Kept {
    fn of(trainer: &Trainer) -> Self {
        let direct = main_grads(trainer.model_in_flight());
        let len = |path: &str| -> usize {
            let shard = &trainer.core.plan.get(path).expect("planned").shard;
            shard.local_shape().iter().product()
        };
        let zeros = |path: &str| Tensor::zeros([len(path)], &Device::flex());
        let masters = trainer.core.optimizer.held_state(len, zeros).masters;
        let mut kept = Self::default();
        for (path, spec) in trainer.core.plan.iter() {
            let len = |tensor: Option<Tensor<1>>| tensor.map_or(0, |tensor| tensor.dims()[0]);
            let all: usize = spec.shard.local_shape().iter().product();
            let gradient = len(trainer.core.grads.get(path));
            kept.parameters += all;
            kept.gradients += gradient;
            kept.masters += masters.get(path).map_or(0, |master| master.range.len());
            kept.of_direct += if direct.contains_key(path) {
                gradient
            } else {
                0
            };
        }
        kept
    }
}

#[rstest]
#[case("tp1", &[])]
#[case("tp2-sp", &["optimizer.name=lion"])]
#[case("dp2", &["parallel.zero=1"])]
#[case("dp4", &["parallel.zero=2", "parallel.zero_ranks=2"])]
#[case("tp2-cp2-sp", &["parallel.zero=2", "data.seq_len=16"])]
#[case("dp2", &["parallel.zero=3"])]
#[case("dp2", &["parallel.zero=1", "optimizer.store_param_remainders=true", "optimizer.exp_avg_dtype=fp8", "optimizer.exp_avg_sq_dtype=bf16"])]
#[case("pp2", &["model.layers=4", "model.tied=false"])]
#[case("pp2-dp2", &["model.layers=4", "parallel.zero=1", "parallel.schedule=zb-v"])]
#[case("dp2-ep2", &["model.family=mixtral", "model.experts.num=4", "parallel.zero=1"])]
fn a_rank_keeps_what_is_estimated(#[case] layout: &str, #[case] sets: &[&str]) {
    let sets = [
        &["train.dtype=bf16", "model.hidden=32", "model.ffn=96"],
        sets,
    ]
    .concat();
    let ranks = trainers(&sets, layout, |trainer| {
        let kept = Kept::of(&trainer);
        Ok((
            trainer.core.config.clone(),
            trainer.layout(),
            trainer.core.groups.pp.rank(),
            kept,
        ))
    });
    let (config, layout, ..) = &ranks[0];
    let estimates = MemoryEstimate::of_stages(config, layout, Scores::Kept).unwrap();
    assert_eq!(estimates.len(), layout.pp);
    for (rank, estimate) in estimates.into_iter().enumerate() {
        let of_stage: Vec<_> = ranks
            .iter()
            .filter(|(_, _, stage, _)| *stage == rank)
            .collect();
        let mean = |of: fn(&Kept) -> usize| {
            of_stage.iter().map(|(.., kept)| of(kept)).sum::<usize>() / of_stage.len()
        };
        let zero = config.parallel.zero;
        let all = mean(|kept| kept.parameters);
        let parameters = match zero {
            // The sharded parameters, the unsharded ones, and those that are gathered.
            3 => mean(|kept| kept.of_direct) + all,
            _ => all,
        };
        let gradients = match zero {
            // At the end of a step, a rank holds the gradients of all its micro-batches.
            0 | 1 => all,
            // The sharded gradients, and those in flight.
            _ => mean(|kept| kept.gradients) + all,
        };
        let parameters = 2 * parameters;
        let gradients = 4 * gradients;
        let of_element = match (
            &config.optimizer,
            config.optimizer.name.to_string().as_str(),
        ) {
            (_, "lion") => 8.0,
            // The remainder of the master, a moment in bf16, and one in 8 bits with a scale of two
            // bytes for 128 elements.
            (optimizer, _) if optimizer.store_param_remainders => 2.0 + 2.0 + 130.0 / 128.0,
            _ => 12.0,
        };
        let optimizer = (of_element * mean(|kept| kept.masters) as f64) as usize;
        for (what, found, expected) in [
            ("parameters", estimate.parameters, parameters),
            ("gradients", estimate.gradients, gradients),
            ("optimizer", estimate.optimizer, optimizer),
        ] {
            let off = found as f64 / expected as f64 - 1.0;
            assert!(
                off.abs() < 0.03,
                "{what}: {found} estimated, {expected} saved by rank {rank}"
            );
        }
        assert!(estimate.activations > 0);
    }
}

/// What a rank will write is known before it has weights.
#[rstest]
#[case("tp1", &[])]
#[case("dp3", &[])]
#[case("dp4", &["parallel.zero=1", "parallel.zero_ranks=2", "train.dtype=bf16"])]
#[case("tp2-dp2-sp", &["parallel.zero=2", "optimizer.name=muon"])]
#[case("tp2-dp2", &["parallel.zero=3", "train.dtype=bf16"])]
#[case("pp2-dp2", &["parallel.zero=1", "optimizer.name=sgd", "optimizer.sgd.momentum=0.9"])]
#[case("dp2-ep2", &["model.family=mixtral", "model.experts.num=4", "parallel.zero=3"])]
#[case("dp2-ep2", &["model.family=deepseek_v3", "model.kv_heads=4", "model.experts.num=4"])]
fn a_rank_writes_what_is_planned(#[case] layout: &str, #[case] sets: &[&str]) {
    let ranks = trainers(sets, layout, |mut trainer| {
        let planned = CheckpointShare::of_rank(&trainer.core.config, &trainer.core.groups)?;
        trainer.step()?;
        let tensors: Vec<_> = trainer
            .core
            .held_tensors(|_, _, _| unreachable!())
            .collect();
        let held = tensors.iter().map(|tensor| {
            let group = match tensor.shard.is_expert() {
                true => &trainer.core.groups.edp,
                false => &trainer.core.groups.dp_cp,
            };
            HeldTensor {
                name: tensor.name.clone(),
                shard: tensor.shard,
                dtype: tensor.dtype,
                range: tensor.range.clone(),
                copies: tensor.copies.unwrap_or(Copies {
                    index: group.rank(),
                    count: group.size(),
                }),
            }
        });
        let held: Vec<_> = held.collect();
        let bytes = |held: &HeldTensor<'_>| (held.range.len() * held.dtype.size()) as u64;
        let plan = WritePlan::new(&held);
        let found = CheckpointShare {
            held_bytes: held.iter().map(bytes).sum(),
            written_bytes: plan.num_bytes(),
            num_pieces: plan.num_pieces(),
        };
        assert_eq!(planned, found);
        Ok(found)
    });
    assert!(ranks.iter().all(|share| share.written_bytes > 0));
}
