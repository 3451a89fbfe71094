//! Runs whose hosts each have a folder of checkpoints of their own.

use std::{fs, path::PathBuf};

use megaburn_test_support::{
    run::{Run, STEPS},
    text::fresh_seed,
};
use rstest::rstest;

use crate::runs::child::Ranks;

/// The hosts of four ranks.
const HOSTS: [&str; 4] = ["a", "a", "b", "b"];
/// Each rank on a host of its own, so that no host has all files.
const FOUR_HOSTS: [&str; 4] = ["a", "b", "c", "d"];

fn local(run: &Run) -> String {
    let dir = run.path("local/{host}");
    format!("train.local_checkpoint_dir={}", dir.display())
}

fn folder(run: &Run, host: &str) -> PathBuf {
    run.path(&format!("local/{host}"))
}

/// A run is killed at any time and one host loses its folder: it continues to the bit, each time
/// without the folder of the other host.
#[rstest]
fn a_run_that_loses_a_host_continues_to_the_bit(
    #[values("tp2-dp2-sp", "pp2-dp2")] layout: &str,
    #[values((0, "false", HOSTS), (1, "true", FOUR_HOSTS), (3, "true", FOUR_HOSTS))] case: (
        u8,
        &str,
        [&str; 4],
    ),
) {
    let (zero, is_async, hosts) = case;
    let is_async = format!("train.async_save={is_async}");
    let zero = format!("parallel.zero={zero}");
    let sets = [&is_async, &zero, "train.checkpoint_interval=1"];
    let whole = Run::new();
    Ranks::threads(&whole.args(layout, STEPS, &sets)).finish();
    let run = Run::new();
    let local = local(&run);
    let sets = [&sets[..], &[&local]].concat();
    let args = run.args(layout, STEPS, &sets);
    let mut random = fastrand::Rng::with_seed(fresh_seed());
    let num_saved = || {
        let text = fs::read_to_string(run.path("run/metrics.jsonl")).unwrap_or_default();
        let lines = text.lines();
        lines
            .filter(|line| line.starts_with("{\"checkpoint\""))
            .count()
    };
    for lost in ["b", "a"] {
        let after = num_saved() + random.usize(1..5);
        let mut ranks = Ranks::on_hosts(&hosts, &args);
        ranks.wait_until(|| num_saved() >= after);
        ranks.kill_all();
        fs::remove_dir_all(folder(&run, lost)).unwrap();
    }
    let ended = Ranks::on_hosts(&hosts, &args).finish();
    let text = &ended[0].stderr;
    assert!(
        text.contains("its files are copied from other hosts"),
        "{text}"
    );
    assert_eq!(whole.numbers(), run.numbers());
    assert!(!run.checkpoints().join("step-00000001").exists());
    let text = fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    let lines = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let from_steps = lines.filter_map(|line| line["from_step"].as_u64());
    assert!(from_steps.filter(|step| *step > 0).count() >= 2, "{text}");
    // All files in one folder are an ordinary checkpoint.
    let newest = run.checkpoints().join(format!("step-{STEPS:08}"));
    fs::create_dir_all(&newest).unwrap();
    for host in hosts {
        for file in fs::read_dir(folder(&run, host).join(newest.file_name().unwrap())).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), newest.join(file.file_name())).unwrap();
        }
    }
    assert_eq!(whole.tensors(STEPS), run.tensors(STEPS));
}

#[test]
fn folders_that_are_not_of_one_host_and_other_runs_are_refused() {
    let run = Run::new();
    let same = format!("train.local_checkpoint_dir={}", run.path("same").display());
    let refused = |args: &[String]| {
        let ended = Ranks::on_hosts(&HOSTS, args).wait_all();
        let codes = ended.iter().map(|rank| rank.code);
        assert!(codes.flatten().all(|code| code == 2), "{ended:?}");
        ended[0].stderr.clone()
    };
    let text = refused(&run.args("dp4", 2, &[&same]));
    assert!(text.contains("is the same folder on hosts"), "{text}");
    let local = local(&run);
    let args = run.args("dp4", 2, &[&local]);
    Ranks::on_hosts(&HOSTS, &args).finish();
    let text = refused(&[&args[..], &["--fresh".to_string()]].concat());
    assert!(text.contains("is a checkpoint of an earlier run"), "{text}");
    assert!(folder(&run, "a").join("step-00000002").exists());
    // A start that does not find the checkpoints does not begin anew.
    let lines = fs::read(run.path("run/metrics.jsonl")).unwrap();
    let other = format!(
        "train.local_checkpoint_dir={}",
        run.path("other/{host}").display()
    );
    for sets in [&[][..], &[other.as_str()]] {
        let text = refused(&run.args("dp4", 2, sets));
        assert!(text.contains("the run has saved step 2, but"), "{text}");
    }
    for host in ["a", "b"] {
        fs::rename(folder(&run, host), run.path(host)).unwrap();
    }
    let text = refused(&args);
    assert!(text.contains("of the hosts a, b (MEGABURN_HOST"), "{text}");
    assert_eq!(fs::read(run.path("run/metrics.jsonl")).unwrap(), lines);
    for host in ["a", "b"] {
        fs::remove_dir_all(folder(&run, host)).unwrap();
        fs::rename(run.path(host), folder(&run, host)).unwrap();
    }
    // Another run with the same folder does not take the checkpoints, nor a lock that is not ours.
    let set = format!("run.dir={}", run.path("second").display());
    let text = refused(&[&args[..], &["--set".to_string(), set]].concat());
    assert!(text.contains("was written by run"), "{text}");
    fs::write(folder(&run, "b").join(".lock"), "mine").unwrap();
    let text = refused(&args);
    assert!(
        text.contains(".lock` was not written by megaburn"),
        "{text}"
    );
    let lock = fs::read_to_string(folder(&run, "b").join(".lock"));
    assert_eq!(lock.unwrap(), "mine");
}

#[test]
fn one_host_keeps_no_copies_and_says_so() {
    let run = Run::new();
    let ended = Ranks::threads(&run.args("dp2", 2, &[&local(&run), "train.checkpoint_replicas=2"]));
    let ended = { ended }.finish();
    let text = &ended[0].stderr;
    assert!(
        text.contains("the run has 1 host(s): 0 other host(s)"),
        "{text}"
    );
}
