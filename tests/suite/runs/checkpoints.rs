//! What checkpoints hold, whatever the layout, the ZeRO stage and the way they are saved.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use burn::prelude::Device;
use megaburn::{
    checkpoint::{Checkpoint, Manifest, checkpoint_step, compare, newest_valid},
    collective::{GroupOptions, ProcessGroups, run_threads},
    report::metrics::{MetricsRecord, read_metrics},
    train::{RunData, TrainConfig, TrainError, Trainer},
};
use rstest::rstest;

use crate::runs::child::Ranks;
use megaburn_test_support::{
    layout_grid::{Matrix, Row},
    run::{Run, STEPS},
    text::{fresh_seed, write_random_text},
};

/// Saves the state after `steps` further steps of the run in `config.run.dir`.
fn save_after(config: TrainConfig, row: &Row, steps: u64, is_async: bool) {
    let data = Arc::new(RunData::load(&config).unwrap());
    let config = Arc::new(config);
    let options = GroupOptions {
        seed: config.run.seed,
        ..Default::default()
    };
    let ranks = run_threads(row.layout.world_size(), options, |world| {
        let groups = ProcessGroups::new(&world, row.layout)?;
        let device = Device::flex().autodiff();
        let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
        let is_resumed = trainer.resume()?.is_some();
        assert_eq!(is_resumed, steps == 0);
        for _ in 0..steps {
            trainer.step()?;
        }
        if is_async {
            let save = trainer.begin_save()?;
            // It holds the values of its start.
            trainer.step()?;
            trainer.finish_save(save)?;
        } else {
            trainer.save()?;
        }
        Ok::<_, TrainError>(())
    });
    for rank in ranks {
        rank.unwrap_or_else(|error| panic!("{}: {error}", row.name()));
    }
}

fn only_checkpoint(dir: &Path) -> Checkpoint {
    newest_valid(&dir.join("checkpoints"))
        .unwrap()
        .checkpoint
        .unwrap()
}

/// A checkpoint of any layout and ZeRO stage, loaded under any other and saved again, has equal
/// weights and moments.
#[test]
fn forty_pairs_of_layouts_and_stages_exchange_their_state_to_the_bit() {
    let seed = fresh_seed();
    let mut random = fastrand::Rng::with_seed(seed);
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text.txt");
    write_random_text(&text, 20_000, seed);
    let text = text.display().to_string();
    let matrix = Matrix::read();
    for pair in 0..40 {
        let [a, b] = loop {
            let [a, b] = [(); 2].map(|()| &matrix.rows[random.usize(0..matrix.rows.len())]);
            if a.model == b.model && a.layout.world_size().max(b.layout.world_size()) <= 8 {
                break [a, b];
            }
        };
        let dirs = [0, 1].map(|number| dir.path().join(format!("{pair}-{number}")));
        for (number, row) in [a, b].into_iter().enumerate() {
            let mut config = row.config(&matrix.models[&row.model], &text);
            // Rows of one model have other batches, which would make another run.
            config.train.global_batch = if a.global_batch == b.global_batch {
                a.global_batch
            } else {
                a.global_batch * b.global_batch
            };
            config.run.dir = dirs[number].display().to_string();
            if number == 1 {
                copy(&dirs[0].join("checkpoints"), &dirs[1].join("checkpoints"));
            }
            let is_async = random.bool() && number == 0;
            save_after(config, row, if number == 0 { 2 } else { 0 }, is_async);
        }
        let [first, second] = dirs.each_ref().map(|dir| only_checkpoint(dir));
        let compared = compare(&first, &second, |_| ()).unwrap();
        assert!(
            compared.is_identical(),
            "{} to {}: {compared:?}",
            a.name(),
            b.name()
        );
        for dir in dirs {
            fs::remove_dir_all(dir).unwrap();
        }
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// The manifests of all checkpoints, without what names the run and its settings.
fn manifests(run: &Run) -> Vec<Manifest> {
    let mut paths: Vec<_> = fs::read_dir(run.checkpoints())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    let manifest = |path: &PathBuf| {
        let checkpoint = Checkpoint::open(path).unwrap();
        checkpoint.verify().unwrap();
        let mut manifest = checkpoint.manifest().clone();
        manifest.run_id = None;
        manifest.trainer = manifest.trainer["progress"].clone();
        manifest
    };
    paths.iter().map(manifest).collect()
}

#[rstest]
fn asynchronous_checkpoints_equal_synchronous_ones(
    #[values("tp1", "tp2-dp2-sp", "pp2-dp2")] layout: &str,
    #[values(0, 1, 3)] zero: u8,
    #[values("f32", "bf16")] dtype: &str,
) {
    let zero = format!("parallel.zero={zero}");
    let dtype = format!("train.dtype={dtype}");
    let [sync, asynchronous] = ["false", "true"].map(|is_async| {
        let run = Run::new();
        let is_async = format!("train.async_save={is_async}");
        let sets = [
            &is_async,
            &zero,
            &dtype,
            "train.checkpoint_interval=2",
            "train.keep_checkpoints=9",
        ];
        Ranks::threads(&run.args(layout, 7, &sets)).finish();
        run
    });
    assert_eq!(sync.numbers(), asynchronous.numbers());
    let [sync, asynchronous] = [sync, asynchronous].map(|run| manifests(&run));
    assert_eq!(sync.len(), 4);
    assert_eq!(sync, asynchronous);
}

/// A run that dies while checkpoints are written continues as if nothing had happened.
#[rstest]
fn a_run_killed_between_asynchronous_saves_continues_to_the_bit(
    #[values("tp1", "tp2-dp2-sp")] layout: &str,
    #[values(0, 3)] zero: u8,
) {
    let zero = format!("parallel.zero={zero}");
    let sets = [
        "train.async_save=true",
        &zero,
        "train.checkpoint_interval=1",
    ];
    let whole = Run::new();
    Ranks::threads(&whole.args(layout, STEPS, &sets)).finish();
    let killed = Run::new();
    let mut random = fastrand::Rng::with_seed(fresh_seed());
    for _ in 0..3 {
        let mut ranks = Ranks::threads(&killed.args(layout, STEPS, &sets));
        let after = killed.steps().len() + random.usize(1..5);
        ranks.wait_until(|| killed.steps().len() >= after.min(STEPS as usize - 1));
        ranks.kill_all();
    }
    Ranks::threads(&killed.args(layout, STEPS, &sets)).finish();
    let text = fs::read_to_string(killed.path("run/metrics.jsonl")).unwrap();
    let lines = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let mut from_steps = lines.filter_map(|line| line["from_step"].as_u64());
    assert!(
        from_steps.any(|step| step > 0),
        "a kill lost all checkpoints"
    );
    assert_eq!(whole.numbers(), killed.numbers());
    assert_eq!(whole.tensors(STEPS), killed.tensors(STEPS));
}

#[test]
fn every_kth_and_the_best_checkpoints_stay() {
    let run = Run::new();
    let sets = [
        "train.checkpoint_interval=1",
        "train.keep_checkpoints=1",
        "train.keep_checkpoints_every=5",
        "train.keep_best_checkpoints=1",
        "train.eval_interval=2",
    ];
    // The best is also known after the run was stopped and started again.
    for steps in [7, 12] {
        Ranks::threads(&run.args("dp2", steps, &sets)).finish();
    }
    let mut evals: Vec<(f64, u64)> = read_metrics(run.path("run/metrics.jsonl"))
        .unwrap()
        .into_iter()
        .filter_map(|record| match record {
            MetricsRecord::Eval(eval) if eval.step < 12 => Some((eval.eval_loss, eval.step)),
            _ => None,
        })
        .collect();
    evals.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut expected = vec![5, 10, 12, evals[0].1];
    expected.sort_unstable();
    expected.dedup();
    let mut steps: Vec<u64> = fs::read_dir(run.checkpoints())
        .unwrap()
        .map(|entry| checkpoint_step(&entry.unwrap().file_name().into_string().unwrap()).unwrap())
        .collect();
    steps.sort_unstable();
    assert_eq!(steps, expected, "{evals:?}");
}

/// A checkpoint in the format before ranges of elements: a run continues from it as the version that
/// wrote it did, and writes the current format.
#[rstest]
#[case("tp2-dp2-sp", 0, 0.0)]
#[case("dp4", 3, 0.02)]
fn a_checkpoint_of_format_2_is_continued(
    #[case] layout: &str,
    #[case] zero: u8,
    #[case] tolerance: f64,
) {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/checkpoint-format-2");
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    copy(
        &fixture.join("step-00000002"),
        &run.join("checkpoints/step-00000002"),
    );
    let path = |name: &str| fixture.join(name).display().to_string();
    let args = [
        "--config",
        &path("config.toml"),
        "--data",
        &path("text.txt"),
        "--layout",
        layout,
    ];
    let mut args: Vec<String> = args.map(String::from).into();
    for set in [
        format!("run.dir={}", run.display()),
        format!("parallel.zero={zero}"),
    ] {
        args.extend(["--set".to_string(), set]);
    }
    Ranks::threads(&args).finish();
    let text = fs::read_to_string(fixture.join("losses.json")).unwrap();
    let losses: Vec<f64> = serde_json::from_str(&text).unwrap();
    let records = read_metrics(run.join("metrics.jsonl")).unwrap().into_iter();
    let found: Vec<_> = records
        .filter_map(|record| match record {
            MetricsRecord::Step(step) => Some(step.loss),
            MetricsRecord::Eval(_) => None,
        })
        .collect();
    assert_eq!(found.len(), 2);
    for (found, expected) in found.iter().zip(&losses[2..]) {
        assert!((found - expected).abs() <= tolerance, "{found} {expected}");
    }
    let formats = [2, 4].map(|step| {
        let path = run.join(format!("checkpoints/step-{step:08}"));
        let checkpoint = Checkpoint::open(&path).unwrap();
        checkpoint.verify().unwrap();
        checkpoint.manifest().format
    });
    assert_eq!(formats, [2, 3]);
}

/// A start from a checkpoint of another layout, precision or optimizer says what it converts.
#[test]
fn what_is_converted_is_said() {
    let run = Run::new();
    let printed = |run: &Run, layout: &str, steps, sets: &[&str]| {
        let ended = Ranks::threads(&run.args(layout, steps, sets)).finish();
        ended.into_iter().next().unwrap().stdout
    };
    let first = printed(
        &run,
        "dp2",
        1,
        &[
            "parallel.zero=3",
            "train.dtype=bf16",
            "optimizer.exp_avg_dtype=bf16",
        ],
    );
    assert!(
        !first.contains("the checkpoint") && !first.contains("weights  "),
        "{first}"
    );
    let same = printed(
        &run,
        "dp2",
        2,
        &[
            "parallel.zero=3",
            "train.dtype=bf16",
            "optimizer.exp_avg_dtype=bf16",
        ],
    );
    assert!(
        !same.contains("the checkpoint was written") && !same.contains("precision"),
        "{same}"
    );
    let resumed = printed(&run, "tp2", 3, &["train.dtype=bf16"]);
    for line in [
        "note     the checkpoint was written under dp2 with parallel.zero 3: each rank read",
        "note     the checkpoint has a lower precision than optimizer.exp_avg_dtype",
    ] {
        assert!(resumed.contains(line), "{line}: {resumed}");
    }
    let other = Run::new();
    let init = format!("model.init={:?}", run.path("run").display().to_string());
    let sets = [
        init.as_str(),
        "optimizer.name=lion",
        "train.dtype=bf16",
        "data.tokenizer=byte",
    ];
    let started = printed(&other, "tp1", 1, &sets);
    let line = "weights  read in f32, computed in bf16, from step 3 of a run; its adamw state is not used: \
        lion and the step count begin anew";
    assert!(started.contains(line), "{started}");
}

/// An asynchronous save that fails is named, and training continues; the next save waits, so that a
/// run whose checkpoints cannot be written ends.
#[test]
fn a_failed_asynchronous_save_is_named_and_training_continues() {
    let run = Run::new();
    let sets = ["train.async_save=true", "train.checkpoint_interval=2"];
    Ranks::threads(&run.args("dp2", 2, &sets)).finish();
    // Files of checkpoints are larger than this limit, others are not.
    let args = run.args("dp2", 5, &sets).join("' '");
    let binary = env!("CARGO_BIN_EXE_megaburn-under-test");
    let script = format!("ulimit -f 64; exec '{binary}' train '{args}'");
    let mut ranks = Ranks::shell(&script, &run.path("."));
    let ended = ranks.wait_all().remove(0);
    let text = &ended.stderr;
    assert_eq!(ended.code, Some(1), "{text}");
    let named = text.contains("training continues, and the newest checkpoint is that of step 2");
    assert!(
        named && text.contains("rank-0000") && text.contains("File too large"),
        "{text}"
    );
    assert_eq!(
        run.steps().len(),
        5,
        "all steps were done before the last save failed"
    );
    let newest = newest_valid(&run.checkpoints())
        .unwrap()
        .checkpoint
        .unwrap();
    assert_eq!(newest.step(), 2);
    Ranks::threads(&run.args("dp2", 5, &sets)).finish();
    assert_eq!(
        newest_valid(&run.checkpoints())
            .unwrap()
            .checkpoint
            .unwrap()
            .step(),
        5
    );
}
