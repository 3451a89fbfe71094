//! What each line of `metrics.jsonl` has.

use std::fs;

use megaburn_test_support::run::Run;
use serde_json::Value;

use super::{killed_and_resumed, train};

fn lines(run: &Run) -> Vec<Value> {
    let text = fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    let parse = |line: &str| serde_json::from_str(line).unwrap();
    text.lines().map(parse).collect()
}

#[test]
fn lines_say_when_they_were_written_by_which_start_after_how_many_tokens() {
    let run = Run::new();
    killed_and_resumed(&run, &["optimizer.decoupled_lr=1e-3"]);
    let (mut start, mut tokens, mut time) = (0, 0, 0.0);
    let mut kinds = [0, 0];
    for line in lines(&run) {
        if let Some(number) = line.get("start") {
            start = number.as_u64().unwrap();
        }
        let kind = ["loss", "eval_loss"].map(|name| line.get(name).is_some());
        if kind == [false, false] {
            continue;
        }
        kinds[usize::from(kind[1])] += 1;
        tokens += line
            .get("tokens")
            .map_or(0, |tokens| tokens.as_u64().unwrap());
        assert_eq!(line["start_number"], start, "{line}");
        assert_eq!(line["consumed_tokens"], tokens, "{line}");
        let wall_time = line["wall_time"].as_f64().unwrap();
        assert!(wall_time >= time && wall_time > 1.6e9, "{line}");
        time = wall_time;
        assert!(line.get("mfu").is_none(), "a CPU has no peak: {line}");
        // Later both rates are `optimizer.min_lr`.
        if kind[0] && line["step"].as_u64().unwrap() < 8 {
            let lr = line["group_lrs"]["decoupled"].as_f64().unwrap();
            assert!(lr > 0.0 && lr < line["lr"].as_f64().unwrap(), "{line}");
        }
    }
    assert!(start == 2 && kinds[0] > 8 && kinds[1] > 1, "{kinds:?}");
}

/// As an earlier version wrote it: a line has none of the new fields.
#[test]
fn a_file_of_an_earlier_version_is_continued() {
    let run = Run::new();
    train(&run, 3, &["log.csv=true"]);
    let new = ["wall_time", "start_number", "consumed_tokens"];
    let old: String = lines(&run)
        .into_iter()
        .map(|mut line| {
            let line = line.as_object_mut().unwrap();
            line.retain(|name, _| !new.contains(&name.as_str()));
            format!("{}\n", serde_json::to_string(line).unwrap())
        })
        .collect();
    fs::write(run.path("run/metrics.jsonl"), old).unwrap();
    let sets = ["log.csv=true", "log.wandb=true", "log.tensorboard=true"];
    train(&run, 5, &sets);
    let steps = run.steps();
    assert_eq!(steps.len(), 5);
    assert_eq!(steps[0].start_number, None);
    assert_eq!(steps[4].start_number, Some(2));
    // The checkpoint records them.
    let tokens: u64 = steps.iter().map(|step| step.tokens).sum();
    assert_eq!(steps[4].consumed_tokens, Some(tokens));
    let csv = fs::read_to_string(run.path("run/metrics.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + 5, "{csv}");
}
