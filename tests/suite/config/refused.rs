//! User errors, and the error message and exit code of each.

use std::{
    fs::{self, OpenOptions},
    net::TcpListener,
    path::Path,
    sync::Arc,
};

use burn::prelude::Device;
use megaburn::{
    collective::{GroupOptions, ProcessGroups, run_threads},
    parallel::read_params,
    train::{RunData, TrainError, Trainer, config::Dtype},
};
use rstest::rstest;

use crate::runs::child::{Ended, Ranks};
use megaburn_test_support::run::{Run, tensor_files};

const BAD_INPUT: i32 = 2;
const NON_FINITE: i32 = 3;

/// Runs one step on one rank, with further arguments.
fn start(run: &Run, more: &[&str]) -> Ended {
    let args = run.args("tp1", 1, &[]).into_iter();
    let args: Vec<_> = args.chain(more.iter().map(ToString::to_string)).collect();
    Ranks::threads(&args).wait_all().remove(0)
}

#[track_caller]
pub(crate) fn assert_refused(ended: &Ended, message: &str) {
    assert_eq!(ended.code, Some(BAD_INPUT), "{ended:?}");
    assert!(
        ended.stderr.contains(message),
        "expected: {message}\nfound: {ended:?}"
    );
    assert!(
        ended.stderr.contains("error: ") && !ended.stderr.contains("panicked"),
        "{ended:?}"
    );
}

#[rstest]
#[case::unknown_key(
    &["--set", "parallel.tpp=2"],
    "unknown key `parallel.tpp` in `--set parallel.tpp=2`; the nearest key is `parallel.tp`"
)]
#[case::unknown_section(
    &["--set", "trian.steps=2"],
    "unknown key `trian` in `--set trian.steps=2`; the nearest key is `train`"
)]
#[case::missing_config(&["--config", "nowhere.toml"], "cannot read `nowhere.toml`")]
#[case::missing_data(&["--data", "nowhere.txt"], "data file `nowhere.txt` does not exist")]
fn a_mistake_is_named(#[case] more: &[&str], #[case] message: &str) {
    let run = Run::new();
    assert_refused(&start(&run, more), message);
    assert!(
        !run.path("run").exists(),
        "a refused run leaves nothing behind"
    );
}

#[rstest]
#[case::empty("", "is empty; give a text with at least one sample")]
#[case::short(
    "fourteen bytes",
    "tokens, but one sample of sequence length 16 needs 17; give more text"
)]
fn too_little_data_is_named(#[case] text: &str, #[case] message: &str) {
    let run = Run::new();
    let data = run.path("little.txt").display().to_string();
    fs::write(&data, text).unwrap();
    let ended = start(&run, &["--data", &data]);
    assert_refused(&ended, message);
    assert!(ended.stderr.contains("little.txt"), "{ended:?}");
    assert!(
        !run.path("run").exists(),
        "a refused run leaves nothing behind"
    );
}

#[rstest]
#[case::model("model.ffn=64", "is from another model: ffn is 48 there and 64 here")]
#[case::tied(
    "model.tied=false",
    "is from another model: tied is true there and false here"
)]
#[case::optimizer(
    "optimizer.name=lion",
    "with another optimizer: optimizer.name is adamw there and lion here; continue it with `megaburn train"
)]
#[case::seed(
    "run.seed=5",
    "with a different sample order: run.seed is 1234 there and 5 here"
)]
#[case::documents(
    "data.documents=true",
    "on samples that were read differently: no data.documents there, data.documents with data.document_multiple 16 here"
)]
#[case::sequence("data.seq_len=8", "sample order: data.seq_len is 16 there and 8 here")]
fn a_checkpoint_of_something_else_is_named(#[case] set: &str, #[case] message: &str) {
    let run = Run::new();
    assert_eq!(start(&run, &[]).code, Some(0));
    let before = run.tensors(1);
    let ended = start(&run, &["--set", set]);
    assert_refused(&ended, message);
    assert!(
        ended.stderr.contains("`megaburn train --resume "),
        "{ended:?}"
    );
    assert_eq!(run.tensors(1), before);
    assert_eq!(start(&run, &["--set", set, "--fresh"]).code, Some(0));
}

fn truncate(checkpoint: &Path) {
    for path in tensor_files(checkpoint) {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    }
}

#[test]
fn a_truncated_checkpoint_is_refused_and_the_one_before_it_taken() {
    let run = Run::new();
    let args = run.args("tp1", 3, &["train.checkpoint_interval=1"]);
    let start = || Ranks::threads(&args).wait_all().remove(0);
    assert_eq!(start().code, Some(0));
    let numbers = run.numbers();

    truncate(&run.checkpoints().join("step-00000003"));
    let ended = start();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(
        ended.stderr.contains("step-00000003 is refused"),
        "{ended:?}"
    );
    assert!(ended.stdout.contains("resumed  after step 2 "), "{ended:?}");
    assert_eq!(run.numbers(), numbers, "step 3 was done again");

    for step in [2, 3] {
        truncate(&run.checkpoints().join(format!("step-{step:08}")));
    }
    let ended = start();
    assert_refused(&ended, "is damaged, and no other checkpoint is intact");
    assert_refused(&ended, "rank-00000.safetensors");
}

#[test]
fn a_folder_whose_run_is_going_on_is_named() {
    let run = Run::new();
    let mut first = Ranks::threads(&run.args("tp1", 1_000_000, &[]));
    first.wait_until(|| !run.steps().is_empty());
    assert_refused(&start(&run, &[]), "is in use by a run");
    first.wait_until(|| run.steps().len() > 10);
}

#[test]
fn a_port_in_use_is_named() {
    let run = Run::new();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let env = [
        ("RANK", "0".to_string()),
        ("LOCAL_RANK", "0".into()),
        ("WORLD_SIZE", "2".into()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        (
            "MASTER_PORT",
            other.local_addr().unwrap().port().to_string(),
        ),
    ];
    let ended = Ranks::with_env(&run.args("tp2", 1, &[]), &env)
        .wait_all()
        .remove(0);
    assert_refused(
        &ended,
        &format!("rank 0 cannot listen at {}", other.local_addr().unwrap()),
    );
    assert_refused(&ended, "choose another port");
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run_with_its_own_code() {
    let run = Run::new();
    let explode = ["optimizer.lr=1e30", "optimizer.warmup_steps=0"];
    let sets = [&explode[..], &["train.checkpoint_interval=1"]].concat();
    let ended = Ranks::threads(&run.args("tp1", 4, &sets))
        .wait_all()
        .remove(0);
    assert_eq!(ended.code, Some(NON_FINITE), "{ended:?}");
    let message = "error: step 2 is not finite (loss ";
    assert!(ended.stderr.contains(message), "{ended:?}");
    assert!(
        ended.stderr.contains("; the weights are those of step 1"),
        "{ended:?}"
    );
    let steps = run.steps();
    assert_eq!(steps.len(), 2);
    assert!(steps[0].loss.is_finite() && steps[0].grad_norm.is_finite());
    assert!(
        !(steps[1].loss.is_finite() && steps[1].grad_norm.is_finite()),
        "{steps:?}"
    );
    let saved: Vec<_> = fs::read_dir(run.checkpoints()).unwrap().collect();
    assert_eq!(saved.len(), 1, "only step 1 is saved: {saved:?}");
    assert_eq!(run.tensors(1).len(), 1);
}

#[rstest]
fn a_loss_that_is_not_finite_leaves_the_weights_of_every_rank_untouched(
    #[values(Dtype::F32, Dtype::Bf16)] dtype: Dtype,
) {
    let run = Run::new();
    let mut config = run.config("tp2-dp2-sp", 4);
    config.train.dtype = dtype;
    config.optimizer.lr = 1e30;
    config.optimizer.warmup_steps = 0;
    let layout = config.layout(None).unwrap();
    let data = Arc::new(RunData::load(&config).unwrap());
    let config = Arc::new(config);
    let ranks = run_threads(layout.world_size(), GroupOptions::default(), |world| {
        let groups = ProcessGroups::new(&world, layout)?;
        let device = Device::flex().autodiff();
        let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
        trainer.step()?;
        let params = read_params(trainer.model());
        let progress = trainer.progress();
        for _ in 0..2 {
            let error = trainer.step().unwrap_err();
            assert!(
                matches!(error, TrainError::NonFinite { step: 2, .. }),
                "{error}"
            );
            assert!(read_params(trainer.model()) == params);
            assert_eq!(trainer.progress(), progress);
            assert_eq!(trainer.optimizer().time(), 1);
        }
        Ok::<_, TrainError>(())
    });
    ranks.into_iter().for_each(|rank| rank.unwrap());
}
