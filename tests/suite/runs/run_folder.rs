//! A run owns the files that it wrote into its folder, and no others.

use std::{fs, path::Path};

use megaburn::checkpoint::{Checkpoint, find_latest};
use megaburn::collective::Group;
use nix::sys::signal::Signal;

use crate::runs::child::{Ended, Ranks};
use megaburn_test_support::{
    run::{Run, tensor_files},
    text::{fresh_seed, write_random_text},
};

/// More steps than any test waits for.
const ENDLESS: u64 = 1_000_000;

fn ended(run: &Run, steps: u64, sets: &[&str]) -> Ended {
    Ranks::threads(&run.args("tp1", steps, sets))
        .wait_all()
        .remove(0)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_folder_of_other_files_is_refused_untouched_or_kept_as_it_is() {
    let run = Run::new();
    let thesis = run.path("run/hf/thesis");
    fs::create_dir_all(thesis.parent().unwrap()).unwrap();
    fs::write(&thesis, "years").unwrap();
    let folder = run.path("run").display().to_string();
    for (sets, what) in [
        (
            &[][..],
            format!("`{folder}` is not empty and is not a run's folder (it contains `hf`)"),
        ),
        (
            &["run.allow_other_files=true"][..],
            format!("`{folder}/hf` was not written by megaburn"),
        ),
    ] {
        let ended = ended(&run, 1, sets);
        assert_eq!(ended.code, Some(2), "{ended:#?}");
        assert!(ended.stderr.contains(&what), "{ended:#?}");
        assert_eq!(
            (names(&run.path("run")), read(&thesis)),
            (vec!["hf".to_string()], "years".into())
        );
    }
    // Under another name it stays next to the run, and so does the user's own configuration.
    fs::rename(run.path("run/hf"), run.path("run/mine")).unwrap();
    let config = format!("# mine\n{}", read(&run.path("config.toml")));
    let config = config.replace("tokenizer = \"byte\"", "tokenizer = \"nowhere.json\"");
    assert!(config.contains("nowhere.json"), "{config}");
    fs::write(run.path("run/config.toml"), &config).unwrap();
    let ended = ended(&run, 1, &["run.allow_other_files=true"]);
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    assert!(
        ended
            .stdout
            .contains("note     config.toml was not written by the run"),
        "{ended:#?}"
    );
    assert_eq!(read(&run.path("run/config.toml")), config);
    assert!(read(&run.path("run/config.resolved.toml")).contains("allow_other_files = true"));
    assert_eq!(read(&run.path("run/mine/thesis")), "years");
    // The resolved configuration contains what the run was trained with.
    let ask = ["generate", &folder, "--prompt", "a", "--max-tokens", "1"];
    Ranks::command(&ask).finish();
}

/// A run resumes from its own checkpoints and keeps the files that others put next to them.
#[test]
fn a_checkpoint_of_another_run_is_named_and_kept_and_hides_nothing() {
    let run = Run::new();
    assert_eq!(ended(&run, 4, &[]).code, Some(0));
    let step = "checkpoints/step-00000004";
    let id = Checkpoint::open(&run.path("run").join(step))
        .unwrap()
        .manifest()
        .run_id
        .clone();
    let id = id.unwrap();
    let dir = |name: &str| format!("run.dir={}", run.path(name).display());
    let copy_into = |name: &str| {
        let to = run.path(name).join(step);
        fs::create_dir_all(&to).unwrap();
        for entry in fs::read_dir(run.path("run").join(step)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    };
    // In a new folder, the run starts from the foreign checkpoint.
    copy_into("branch");
    let branch = [
        &dir("branch"),
        "train.keep_checkpoints=1",
        "train.checkpoint_interval=1",
    ];
    let began = ended(&run, 6, &branch);
    assert_eq!(began.code, Some(0), "{began:#?}");
    let line = format!("resumed  after step 4 from a checkpoint of run {id} that was copied here");
    assert!(began.stdout.contains(&line), "{began:#?}");
    let kept = names(&run.path("branch/checkpoints"));
    assert_eq!(kept, ["step-00000004", "step-00000006"]);

    // It must not replace what a run has learned itself.
    assert_eq!(ended(&run, 2, &[&dir("other")]).code, Some(0));
    copy_into("other");
    let refused = ended(&run, 6, &[&dir("other")]);
    assert_eq!(refused.code, Some(2), "{refused:#?}");
    let why =
        format!("is the newest and was written by run {id}, but this run has its own checkpoints");
    assert!(refused.stderr.contains(&why), "{refused:#?}");
    fs::remove_dir_all(run.path("other").join(step)).unwrap();
    let went_on = ended(&run, 3, &[&dir("other")]);
    assert!(
        went_on
            .stdout
            .contains("resumed  after step 2 from the run's own"),
        "{went_on:#?}"
    );
}

/// faults/07: a run whose folder is removed stops with an error that names it, and leaves the
/// folder of the next run alone.
#[test]
fn a_run_whose_folder_was_removed_stops_and_writes_into_no_other_run() {
    let run = Run::new();
    let args = run.args("tp1", ENDLESS, &["train.checkpoint_interval=1"]);
    let mut first = Ranks::threads(&args);
    first.wait_until(|| run.checkpoints().join("step-00000002").is_dir());
    fs::rename(run.path("run"), run.path("gone")).unwrap();
    let mut second = Ranks::threads(&run.args("tp1", 1, &["run.seed=7"]));
    second.finish();
    let ended = first.wait_all().remove(0);
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    assert!(
        ended.stderr.contains("no longer owns its folder"),
        "{ended:#?}"
    );
    assert_eq!(names(&run.checkpoints()), ["step-00000001"]);
    assert_eq!(run.steps().len(), 1);
}

/// faults/14: removed metrics are written anew, and their loss ends nothing.
#[test]
fn metrics_that_are_removed_come_back() {
    let run = Run::new();
    let mut ranks = Ranks::threads(&run.args("tp1", ENDLESS, &[]));
    ranks.wait_until(|| run.steps().len() >= 2);
    fs::remove_file(run.path("run/metrics.jsonl")).unwrap();
    ranks.wait_until(|| run.steps().len() >= 4);
    ranks.signal(0, Signal::SIGTERM);
    let ended = ranks.finish().remove(0);
    assert!(
        ended.stderr.contains("was removed; it was rewritten"),
        "{ended:#?}"
    );
    let steps: Vec<u64> = run.steps().iter().map(|step| step.step).collect();
    assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>());
    let first = read(&run.path("run/metrics.jsonl"));
    let start: serde_json::Value = serde_json::from_str(first.lines().next().unwrap()).unwrap();
    assert_eq!(
        (&start["start"], &start["from_step"]),
        (&1.into(), &0.into())
    );
    let newest = find_latest(&run.checkpoints(), &Group::single(0))
        .unwrap()
        .checkpoint
        .unwrap();
    assert_eq!(
        newest.manifest().run_id.as_deref(),
        start["run_id"].as_str()
    );
}

/// faults/10 and faults/17: neither a damaged checkpoint nor one of infinite weights replaces an
/// intact one.
#[test]
fn whole_checkpoints_are_kept() {
    let run = Run::new();
    let sets = ["train.checkpoint_interval=2", "train.keep_checkpoints=2"];
    assert_eq!(ended(&run, 6, &sets).code, Some(0));
    let newest = run.checkpoints().join("step-00000006");
    let file = fs::File::options()
        .write(true)
        .open(&tensor_files(&newest)[0])
        .unwrap();
    file.set_len(100).unwrap();
    let odd = ended(
        &run,
        7,
        &["train.checkpoint_interval=3", "train.keep_checkpoints=2"],
    );
    assert!(
        odd.stderr.contains("is refused") && odd.stderr.contains("set aside"),
        "{odd:#?}"
    );
    let kept = names(&run.checkpoints());
    assert_eq!(kept.len(), 3);
    assert!(kept[0] == "step-00000006" && kept[1].starts_with("step-00000006.damaged-"));
    let is_whole = |name: &str| {
        Checkpoint::open(&run.checkpoints().join(name))
            .unwrap()
            .verify()
            .is_ok()
    };
    assert!(is_whole("step-00000006") && is_whole("step-00000007"));

    let bad = [
        "train.checkpoint_interval=1",
        "train.keep_checkpoints=1",
        "optimizer.lr=1e39",
    ];
    let poisoned = ended(&run, 9, &bad);
    assert_eq!(poisoned.code, Some(3), "{poisoned:#?}");
    assert!(
        poisoned.stderr.contains("is not finite on rank 0"),
        "{poisoned:#?}"
    );
    assert!(is_whole("step-00000007"));
    assert_eq!(ended(&run, 8, &[]).code, Some(0));
}

/// A run ignores checkpoints that may hold wrong values. If it has no others, it is refused and does not
/// start at step 0.
#[test]
fn a_run_continues_from_a_checkpoint_that_is_not_suspect_and_from_nothing_else() {
    let run = Run::new();
    let sets = ["train.checkpoint_interval=2"];
    assert_eq!(ended(&run, 4, &sets).code, Some(0));
    let at = |name: &str| run.checkpoints().join(name);
    let suspect = "step-00000004.suspect-1f-2a";
    fs::rename(at("step-00000004"), at(suspect)).unwrap();
    let older = ended(&run, 5, &sets);
    assert_eq!(older.code, Some(0), "{older:#?}");
    assert!(format!("{older:?}").contains("after step 2"), "{older:#?}");
    for step in [2, 4, 5] {
        // Remove all that are not suspect.
        let _ = fs::remove_dir_all(at(&format!("step-{step:08}")));
    }
    for arg in [None, Some("--dry-run")] {
        let mut args = run.args("tp1", 6, &sets);
        args.extend(arg.map(String::from));
        let refused = Ranks::threads(&args).wait_all().remove(0);
        assert_eq!(refused.code, Some(2), "{refused:#?}");
        assert!(refused.stderr.contains(suspect), "{refused:#?}");
    }
    fs::rename(at(suspect), at("step-00000004")).unwrap();
    assert_eq!(ended(&run, 6, &sets).code, Some(0));
}

/// A run that is killed in its last evaluation has already saved; on resume it only runs the
/// evaluation.
#[test]
fn the_last_step_is_saved_before_the_last_evaluation_which_can_be_stopped() {
    let run = Run::new();
    write_random_text(&run.path("text.txt"), 2_000_000, fresh_seed());
    let long = [
        "train.eval_interval=0",
        "train.eval_batches=1000000",
        "data.validation_fraction=0.9",
    ];
    let mut ranks = Ranks::threads(&run.args("tp2", 2, &long));
    ranks.wait_until(|| run.checkpoints().join("step-00000002").is_dir());
    ranks.signal(0, Signal::SIGTERM);
    let stopped = ranks.finish().remove(0);
    assert!(
        stopped
            .stdout
            .contains("stopped by SIGTERM after step 2, saved"),
        "{stopped:#?}"
    );
    assert!(!read(&run.path("run/metrics.jsonl")).contains("eval_loss"));
    let short = ["train.eval_interval=0", "data.validation_fraction=0.9"];
    let finished = Ranks::threads(&run.args("tp2", 2, &short))
        .finish()
        .remove(0);
    assert!(
        finished.stdout.contains("finished 2 steps"),
        "{finished:#?}"
    );
    assert_eq!(
        read(&run.path("run/metrics.jsonl"))
            .matches("eval_loss")
            .count(),
        1
    );
}

/// D17: the run that --fresh discards is kept until the new run has a checkpoint.
#[test]
fn fresh_keeps_the_run_before_until_there_is_a_checkpoint() {
    let run = Run::new();
    assert_eq!(ended(&run, 2, &[]).code, Some(0));
    let fresh = |steps| [run.args("tp1", steps, &[]), vec!["--fresh".into()]].concat();
    let mut ranks = Ranks::threads(&fresh(ENDLESS));
    ranks.wait_until(|| run.steps().len() >= 3);
    ranks.kill_all();
    let aside = names(&run.path("run"))
        .into_iter()
        .find(|name| name.starts_with("before-"));
    let aside = run.path("run").join(aside.unwrap());
    let old = find_latest(&aside.join("checkpoints"), &Group::single(0)).unwrap();
    assert_eq!(old.checkpoint.unwrap().step(), 2);
    let ended = Ranks::threads(&fresh(1)).finish().remove(0);
    assert!(
        ended.stdout.contains("note     the previous run is in "),
        "{ended:#?}"
    );
    assert!(!aside.exists());
    assert_eq!(names(&run.checkpoints()), ["step-00000001"]);

    let init = format!("model.init={}", run.path("run").display());
    let mut inside = fresh(1);
    inside.extend(["--set".to_string(), init]);
    let refused = Ranks::threads(&inside).wait_all().remove(0);
    assert_eq!(refused.code, Some(2), "{refused:#?}");
}
