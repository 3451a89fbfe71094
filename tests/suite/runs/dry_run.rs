//! `train --dry-run`: what a start checks, without a start.

use std::fs;

use megaburn_test_support::run::Run;
use rstest::rstest;

use crate::runs::child::Ranks;

fn dry(args: &[String]) -> Vec<String> {
    [args, &["--dry-run".to_string()]].concat()
}

#[test]
fn a_run_that_can_start_is_described_and_nothing_is_written() {
    let run = Run::new();
    let args = run.args("tp2-dp2-sp", 4, &[]);
    let ended = Ranks::threads(&dry(&args)).finish().remove(0);
    for line in [
        "layout   tp2-dp2-sp: 4 ranks",
        "model    llama, ",
        " on a rank for parameters, gradients, optimizer state and activations",
        "would start at step 1 of 4",
        "dry run  nothing was trained or written; the run can start",
    ] {
        assert!(ended.stdout.contains(line), "{line}: {ended:?}");
    }
    assert!(!run.path("run").exists());

    Ranks::threads(&args).finish();
    let before = run.tensors(4);
    let ended = Ranks::threads(&dry(&args)).finish().remove(0);
    assert!(
        ended.stdout.contains("is complete at step 4 of 4"),
        "{ended:?}"
    );
    // A longer run, under another layout and with another learning rate.
    let longer = run.args("dp2", 6, &["optimizer.lr=1e-3"]);
    let ended = Ranks::threads(&dry(&longer)).finish().remove(0);
    for line in [
        "would resume after step 4 of 6 from ",
        "changed  optimizer.lr: 0.01 -> 0.001",
    ] {
        assert!(ended.stdout.contains(line), "{line}: {ended:?}");
    }
    assert_eq!(run.tensors(4), before);
    assert_eq!(run.steps().len(), 4);
}

/// Bad input ends a dry run as it ends the run: with the same error and the same exit code.
#[rstest]
#[case("tp3", &[], "attention heads 4 is not divisible by tp 3")]
#[case("tp1", &["data.path=nowhere.txt"], "nowhere.txt")]
#[case("tp1", &["data.seq_len=100000"], "data.seq_len")]
#[case("dp2", &["train.global_batch=7"], "train.global_batch")]
#[case("tp1", &["model.init=nowhere"], "nowhere")]
#[case("tp1", &["run.dir=text.txt/run"], "text.txt/run")]
fn bad_input_ends_it_as_it_ends_the_run(
    #[case] layout: &str,
    #[case] sets: &[&str],
    #[case] message: &str,
) {
    let run = Run::new();
    let inside = |set: &&str| {
        set.replace(
            "run.dir=text.txt",
            &format!("run.dir={}", run.path("text.txt").display()),
        )
    };
    let sets: Vec<String> = sets.iter().map(inside).collect();
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let args = run.args(layout, 2, &sets);
    let [checked, started] =
        [dry(&args), args].map(|args| Ranks::threads(&args).wait_all().remove(0));
    assert_eq!(checked.code, Some(2), "{checked:?}");
    assert!(checked.stderr.contains(message), "{checked:?}");
    assert_eq!(
        (checked.code, &checked.stderr),
        (started.code, &started.stderr)
    );
}

/// So do a folder of others and a checkpoint that the run cannot continue from.
#[rstest]
#[case(&["model.layers=3"])]
#[case(&["optimizer.name=lion"])]
#[case(&["run.seed=7"])]
fn a_checkpoint_that_does_not_fit_is_refused(#[case] sets: &[&str]) {
    let run = Run::new();
    Ranks::threads(&run.args("tp1", 2, &[])).finish();
    let args = run.args("tp1", 4, sets);
    let [checked, started] =
        [dry(&args), args].map(|args| Ranks::threads(&args).wait_all().remove(0));
    assert_eq!(checked.code, Some(2), "{checked:?}");
    assert_eq!(
        (checked.code, &checked.stderr),
        (started.code, &started.stderr)
    );
}

#[test]
fn a_folder_of_others_is_refused() {
    let run = Run::new();
    fs::create_dir(run.path("run")).unwrap();
    fs::write(run.path("run/thesis.txt"), "mine").unwrap();
    let args = run.args("tp1", 2, &[]);
    let [checked, started] =
        [dry(&args), args].map(|args| Ranks::threads(&args).wait_all().remove(0));
    assert_eq!(checked.code, Some(2), "{checked:?}");
    assert!(checked.stderr.contains("thesis.txt"), "{checked:?}");
    assert_eq!(
        (checked.code, &checked.stderr),
        (started.code, &started.stderr)
    );
}
