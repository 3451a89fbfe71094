//! `prune`.

use nix::sys::signal::Signal;

use super::{checkpoint, copy, flip, json, names, output, refused, step, train, trained};
use crate::runs::child::Ranks;

#[test]
fn prune_deletes_only_with_yes_and_only_what_is_old_whole_and_own() {
    let run = trained("tp2");
    train(&run, "tp2", 12);
    let other = trained("tp1");
    copy(&step(&other, 2), &step(&run, 1));
    flip(&step(&run, 10).join("rank-00000.safetensors"));
    let all = names(&run.checkpoints());
    assert_eq!(all.len(), 7);

    let listed = json(&run, "prune /run --keep 2 --keep-every 4", 1);
    let of = |action: &str| -> Vec<u64> {
        let rows = listed.iter().filter(|row| row["action"] == action);
        rows.filter_map(|row| row["step"].as_u64()).collect()
    };
    assert_eq!(
        (of("kept"), of("would_delete")),
        (vec![12, 8, 4], vec![6, 2])
    );
    let damaged: Vec<_> = listed
        .iter()
        .filter(|row| row["action"] == "damaged")
        .collect();
    assert!(damaged.len() == 1 && damaged[0]["why"].as_str().unwrap().contains("xxh3"));
    let text = output(&run, "prune /run --keep 2 --keep-every 4", 1);
    assert!(text.contains("nothing was deleted: add --yes"), "{text}");
    assert!(text.contains("1 checkpoint that another run"), "{text}");
    assert_eq!(names(&run.checkpoints()), all);

    output(&run, "prune /run --keep 2 --keep-every 4 --yes", 1);
    let kept = [1, 4, 8, 10, 12].map(|step| format!("step-{step:08}"));
    assert_eq!(names(&run.checkpoints()), kept);
    std::fs::remove_dir_all(step(&run, 10)).unwrap();
    output(&run, "prune /run --keep 1 --yes", 0);
    assert_eq!(
        names(&run.checkpoints()),
        ["step-00000001", "step-00000012"]
    );
    train(&run, "tp1", 14);
}

#[test]
fn a_run_in_progress_is_not_pruned_and_not_disturbed() {
    let run = trained("tp1");
    let sets = ["train.checkpoint_interval=2", "train.keep_checkpoints=99"];
    let mut ranks = Ranks::threads(&run.args("tp1", 1_000_000, &sets));
    ranks.wait_until(|| step(&run, 10).is_dir());
    let error = refused(&run, "prune /run --keep 1 --yes");
    assert!(error.contains("is in use by a run (host "), "{error}");
    assert!(step(&run, 2).is_dir());
    // Looking at it is fine, also while it saves.
    for _ in 0..5 {
        for line in ["ls /run", "show /run", "verify /run"] {
            output(&run, line, 0);
        }
    }
    ranks.signal(0, Signal::SIGTERM);
    ranks.finish();
    output(&run, "prune /run --keep 1 --yes", 0);
    assert_eq!(names(&run.checkpoints()).len(), 1);
    assert!(refused(&run, "prune /run/checkpoints --keep 1").contains("has no run.json"));
    let zero = checkpoint(&run, "prune /run --keep 0");
    assert_eq!(zero.code, Some(2), "{zero:#?}");
}

#[test]
fn the_best_checkpoints_are_those_of_the_evaluations() {
    let run = trained("tp1");
    let metrics = run.path("run/metrics.jsonl");
    let mut text = std::fs::read_to_string(&metrics).unwrap();
    let steps = text.lines().filter(|line| !line.contains("eval_loss"));
    text = steps.map(|line| format!("{line}\n")).collect();
    std::fs::write(&metrics, &text).unwrap();
    let error = refused(&run, "prune /run --keep 1 --keep-best 1");
    assert!(error.contains("has no evaluation"), "{error}");
    for (step, loss) in [(2, 0.5), (4, 1.5)] {
        let other = 2.0 - loss;
        text += &format!("{{\"step\":{step},\"eval_loss\":{loss}}}\n");
        text += &format!("{{\"step\":{step},\"data\":\"other\",\"eval_loss\":{other}}}\n");
    }
    std::fs::write(&metrics, text).unwrap();
    output(&run, "prune /run --keep 1 --keep-best 1 --yes", 0);
    let kept = ["step-00000002", "step-00000006"];
    assert_eq!(names(&run.checkpoints()), kept);
}
