use std::collections::BTreeMap;

use burn::tensor::{DType, TensorData};
use megaburn_optim::{HeldState, Moment};
use megaburn_parallel::{lazy_params, load_params, read_params};
use rstest::rstest;

use super::*;
use crate::{
    state_name::StateKind,
    trainer::{
        Trainer,
        testing::{poison, trainers},
    },
};

const F32: &str = "train.dtype=f32";
const BF16: &str = "train.dtype=bf16";
const DOWN: &str = "blocks.1.mlp.down.weight";
const NORM: &str = "blocks.0.mlp_norm.gamma";

#[rstest]
// Data-parallel copies; a norm, which tensor-parallel ranks hold too; keys and values, with
// fewer heads than ranks.
#[case("dp3", 2, "blocks.1.mlp.down.weight", [0, 2])]
#[case("tp2-dp2", 3, "blocks.1.attention.output.weight", [1, 3])]
#[case("tp2", 1, "blocks.0.mlp_norm.gamma", [0, 1])]
#[case("tp4", 3, "blocks.1.attention.qkv.weight", [2, 3])]
#[case("pp2-dp2", 3, "blocks.1.mlp.down.weight", [2, 3])]
#[case("cp2", 1, "blocks.0.mlp_norm.gamma", [0, 1])]
// The matrix with which the model begins and ends.
#[case("pp2-dp2", 2, "embedding.weight", [0, 2])]
fn a_copy_that_differs_is_found(
    #[case] layout: &str,
    #[case] rank: usize,
    #[case] param: &str,
    #[case] ranks: [usize; 2],
    #[values("parallel.zero=0", "parallel.zero=1")] zero: &str,
) {
    // The poisoned element is the last one, so it must not be padding.
    let errors = trainers(&[zero, "model.vocab=384"], layout, |mut trainer| {
        trainer.step()?;
        trainer.check_replicas()?;
        if trainer.core.groups.world.rank() == rank {
            poison(&mut trainer, param, 0.5);
        }
        Ok(trainer.check_replicas().unwrap_err().to_string())
    });
    let [a, b] = ranks;
    let text =
        format!("after step 1 ranks {a} and {b} have different copies of the weight of `{param}`");
    for error in errors {
        assert!(error.starts_with(&text), "{error}");
    }
}

#[rstest]
fn shares_of_masters_are_no_copies(
    #[values("dp2", "tp2-dp3")] layout: &str,
    #[values(
        "parallel.zero=0",
        "parallel.zero=1",
        "parallel.zero=2",
        "parallel.zero=3"
    )]
    zero: &str,
) {
    trainers(&[zero, BF16], layout, |mut trainer| {
        trainer.step()?;
        trainer.check_replicas()
    });
}

/// Flips the lowest bit of the last f32 number that this rank keeps of a tensor: of a master, that
/// leaves the weight as it is. Returns whether the rank keeps any of it.
fn flip(trainer: &mut Trainer, kind: StateKind, param: &str) -> bool {
    let core = &mut trainer.core;
    let HeldState { masters, moments } = core.held_state();
    let mut flipped = false;
    let mut changed = |path: &str, is_kind: bool, data: TensorData| {
        let data = data.convert_dtype(DType::F32);
        let mut values: Vec<f32> = data.try_to_vec().unwrap();
        if path == param
            && is_kind
            && let Some(last) = values.last_mut()
        {
            *last = f32::from_bits(last.to_bits() ^ 1);
            flipped = true;
        }
        let len = values.len();
        TensorData::new(values, [len])
    };
    let mut moments: BTreeMap<(Moment, String), TensorData> = moments
        .into_iter()
        .map(|((moment, path), state)| {
            let range = state.range.clone();
            let data = changed(&path, kind == moment.into(), state.read(range).unwrap());
            ((moment, path), data)
        })
        .collect();
    let time = core.optimizer.time();
    let mut whole: BTreeMap<String, TensorData> = lazy_params(core.model())
        .into_iter()
        .filter(|param| !core.sharding.is_param_sharded(&param.path))
        .map(|param| (param.path.clone(), param.flat().into_data()))
        .collect();
    // A sharded parameter that has no master is among the masters.
    let is_master = matches!(kind, StateKind::Master | StateKind::Weight);
    let mut parts = BTreeMap::new();
    for (path, state) in masters {
        let range = state.range.clone();
        let data = changed(&path, is_master, state.read(range.clone()).unwrap());
        match whole.get_mut(&path) {
            None => drop(parts.insert(path, data)),
            Some(whole) => {
                let wide = whole.clone().convert_dtype(DType::F32);
                let mut values: Vec<f32> = wide.try_to_vec().unwrap();
                values[range].copy_from_slice(&data.try_to_vec::<f32>().unwrap());
                let len = values.len();
                *whole = TensorData::new(values, [len]);
            }
        }
    }
    if kind == StateKind::Weight {
        let data = whole.remove(param);
        whole.extend(data.map(|data| (param.to_string(), changed(param, true, data))));
    }
    core.optimizer
        .load_state(time, &core.grads, |path, moment, _| {
            Ok::<_, TrainError>(moments.remove(&(moment, path.to_string())).unwrap())
        })
        .unwrap();
    let model = core.model.take().unwrap();
    let dtype = core.config.train.dtype.into();
    let model = core.optimizer.restore_params(model, dtype, |path, _| {
        let data = whole.remove(path).or_else(|| parts.remove(path));
        Ok::<_, TrainError>(data.unwrap().convert_dtype(DType::F32))
    });
    core.model = Some(model.unwrap());
    flipped
}

#[rstest]
#[case("dp2", F32, StateKind::Weight, DOWN, [0, 1])]
#[case("dp2", F32, StateKind::ExpAvg, DOWN, [0, 1])]
#[case("dp2", BF16, StateKind::Master, DOWN, [0, 1])]
#[case("tp2-dp2", F32, StateKind::ExpAvgSq, DOWN, [1, 3])]
#[case("tp2-dp2", BF16, StateKind::Master, NORM, [0, 3])]
#[case("tp2-dp2", BF16, StateKind::ExpAvg, NORM, [0, 3])]
fn a_bit_that_differs_between_copies_is_found(
    #[case] layout: &str,
    #[case] dtype: &str,
    #[case] kind: StateKind,
    #[case] param: &str,
    #[case] ranks: [usize; 2],
) {
    let sets = [dtype, "parallel.zero=0"];
    let errors = trainers(&sets, layout, |mut trainer| {
        trainer.step()?;
        trainer.check_replicas()?;
        if trainer.core.groups.world.rank() == ranks[1] {
            assert!(flip(&mut trainer, kind, param));
        }
        Ok(trainer.check_replicas().unwrap_err().to_string())
    });
    let [a, b] = ranks;
    let text =
        format!("after step 1 ranks {a} and {b} have different copies of the {kind} of `{param}`");
    // Of four copies of a norm, one is the wrong one.
    let is_second_wrong = layout == "tp2-dp2" && param == NORM;
    for error in errors {
        assert!(error.starts_with(&text), "{error}");
        let names_it = error.contains("hardware of rank 3, which differs from most copies,");
        assert_eq!(names_it, is_second_wrong, "{error}");
    }
}

/// Of what ZeRO shards, tensor-parallel ranks hold copies of norms.
#[rstest]
fn copies_of_shares_are_compared(
    #[values(StateKind::Master, StateKind::ExpAvg, StateKind::ExpAvgSq)] kind: StateKind,
    #[values("parallel.zero=1", "parallel.zero=3")] zero: &str,
) {
    let errors = trainers(&[BF16, zero], "tp2-dp2", |mut trainer| {
        trainer.step()?;
        trainer.check_replicas()?;
        if trainer.core.groups.tp.rank() == 1 {
            flip(&mut trainer, kind, NORM);
        }
        Ok(trainer.check_replicas().unwrap_err().to_string())
    });
    for error in errors {
        let text = format!("have different copies of the {kind} of `{NORM}`: ");
        assert!(error.contains(&text), "{error}");
    }
}

#[test]
fn gradients_that_differ_are_found() {
    let errors = trainers(&["parallel.zero=0"], "dp2", |mut trainer| {
        trainer.step()?;
        trainer.check_replicas()?;
        if trainer.core.groups.world.rank() == 1 {
            // The factor of all gradients of this rank, by a bit.
            trainer.core.grads.scale(1.0 + f64::from(f32::EPSILON));
        }
        Ok(trainer.check_replicas().unwrap_err().to_string())
    });
    for error in errors {
        let text = "after step 1 ranks 0 and 1 have different copies of the gradient of `";
        assert!(error.starts_with(text), "{error}");
    }
}

/// A matrix of which this rank keeps something.
fn kept_matrix(trainer: &Trainer) -> String {
    let grads = &trainer.core.grads;
    let is_kept = |path: &&str| grads.kept(path).is_some_and(|(range, _)| !range.is_empty());
    let mut matrices = grads.paths().filter(|path| path.starts_with("blocks."));
    let found = matrices.find(|path| path.ends_with(".weight") && is_kept(path));
    found.unwrap().to_string()
}

/// What no other rank holds is compared with what the last update left.
#[rstest]
#[case("dp2", "parallel.zero=1", BF16, StateKind::Master)]
#[case("dp2", "parallel.zero=1", F32, StateKind::ExpAvg)]
#[case("dp2", "parallel.zero=3", F32, StateKind::Weight)]
#[case("dp2", "parallel.zero=3", BF16, StateKind::Master)]
#[case("dp2", "parallel.zero=3", BF16, StateKind::ExpAvgSq)]
#[case("tp2-dp2", "parallel.zero=1", BF16, StateKind::Master)]
#[case("tp2-dp2", "parallel.zero=3", BF16, StateKind::ExpAvg)]
#[case("tp2", "parallel.zero=0", F32, StateKind::Weight)]
#[case("tp1", "parallel.zero=0", BF16, StateKind::ExpAvg)]
fn a_bit_that_changes_between_updates_is_found(
    #[case] layout: &str,
    #[case] zero: &str,
    #[case] dtype: &str,
    #[case] kind: StateKind,
) {
    let rank = 0;
    let errors = trainers(&[zero, dtype], layout, |mut trainer| {
        trainer.step()?;
        trainer.core.check_state()?;
        // A rank whose shards are replaced gathers them again, so all do.
        trainer.core.sharding.release();
        // Of data-parallel ranks, the first keeps matrices of blocks, and the others the vocabulary's.
        let is_first = trainer.core.groups.world.rank() == rank;
        let param = is_first.then(|| kept_matrix(&trainer));
        if let Some(param) = &param {
            assert!(flip(&mut trainer, kind, param));
        }
        let error = trainer.step().unwrap_err().to_string();
        Ok((error, param))
    });
    let param = errors[rank].1.clone().unwrap();
    for (error, _) in errors {
        let expected = format!(
            "on rank {rank} the {kind} of `{param}` is not what step 1 left, found at the update of \
            step 2: the memory of rank {rank} failed; resume the run without that GPU or \
            host"
        );
        assert_eq!(error, expected);
    }
}

#[rstest]
fn state_without_faults_is_never_refused(
    #[values("dp2", "tp2-dp2-sp", "pp2-dp2", "cp2")] layout: &str,
    #[values("parallel.zero=0", "parallel.zero=1", "parallel.zero=3")] zero: &str,
    #[values(
        &[F32, "train.hidden_dropout=0.2"],
        &[BF16, "train.attention_dropout=0.1"],
        &[BF16, "optimizer.store_param_remainders=true", "optimizer.exp_avg_dtype=fp8"],
        &[BF16, "optimizer.name=muon"],
    )]
    sets: &[&str],
) {
    trainers(&[&[zero], sets].concat(), layout, |mut trainer| {
        for _ in 0..3 {
            trainer.step()?;
            trainer.core.check_state()?;
        }
        trainer.evaluate()?;
        trainer.step()
    });
}

#[test]
fn the_rank_that_differs_from_most_is_named() {
    let copies = |hashes: &[u64]| {
        let all: Vec<_> = hashes.iter().map(|hash| vec![(7, 0), (5, *hash)]).collect();
        first_difference(&all).map(|found| (found.ranks, found.position, found.is_second_wrong))
    };
    assert_eq!(copies(&[1, 1, 1]), None);
    assert_eq!(copies(&[1, 2]), Some(([0, 1], 1, false)));
    assert_eq!(copies(&[2, 1, 1]), Some(([1, 0], 1, true)));
    assert_eq!(copies(&[1, 1, 2, 1]), Some(([0, 2], 1, true)));
    assert_eq!(copies(&[1, 1, 2, 2]), Some(([0, 2], 1, false)));
}

/// Doubles the first weight of [`DOWN`], unseen by the trainer.
fn double_a_weight(trainer: &mut Trainer) {
    let mut params: BTreeMap<_, _> = read_params(trainer.model()).into_iter().collect();
    let data = params[DOWN].clone();
    let dtype = data.dtype();
    let mut values: Vec<f32> = data.clone().convert_dtype(DType::F32).try_to_vec().unwrap();
    values[0] *= 2.0;
    let changed = TensorData::new(values, data.shape().clone());
    params.insert(DOWN.into(), changed.convert_dtype(dtype));
    let model = trainer.core.model.take().unwrap();
    let next = |path: &str, _: &[usize]| Ok::<_, TrainError>(params.remove(path).unwrap());
    trainer.core.model = Some(load_params(model, next).unwrap());
}

/// The next update replaces a gathered copy, but the gradient has seen its flipped bit.
#[rstest]
fn a_gathered_weight_that_changes_between_updates_is_found(#[values(F32, BF16)] dtype: &str) {
    let errors = trainers(&[dtype, "parallel.zero=1"], "dp2", |mut trainer| {
        trainer.step()?;
        trainer.core.check_state()?;
        if trainer.core.groups.world.rank() == 1 {
            double_a_weight(&mut trainer);
        }
        Ok(trainer.step().unwrap_err().to_string())
    });
    for error in errors {
        let text = format!("on rank 1 the weight of `{DOWN}` is not what step 1 left");
        assert!(error.starts_with(&text), "{error}");
    }
}

/// A weight that is rounded from a master is compared as well.
#[test]
fn a_rounded_weight_that_differs_is_found() {
    let errors = trainers(&[BF16, "parallel.zero=1"], "dp2", |mut trainer| {
        trainer.step()?;
        trainer.check_replicas()?;
        if trainer.core.groups.world.rank() == 1 {
            double_a_weight(&mut trainer);
        }
        Ok(trainer.check_replicas().unwrap_err().to_string())
    });
    for error in errors {
        let text = format!("ranks 0 and 1 have different copies of the weight of `{DOWN}`");
        assert!(error.contains(&text), "{error}");
    }
}
