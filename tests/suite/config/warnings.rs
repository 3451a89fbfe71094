//! Warnings of a run about settings that may be unintended.

use crate::runs::child::Ranks;
use megaburn_test_support::run::Run;

#[test]
fn a_run_says_what_may_not_be_meant() {
    let run = Run::new();
    let sets = [
        "data.validation_fraction=0",
        "train.eval_interval=1",
        "optimizer.warmup_steps=10",
        "generate.tokens=1",
        "generate.temperature=0",
    ];
    let data = run.path("novel.txt").display().to_string();
    std::fs::write(
        &data,
        "It was the best of times, it was the worst of times. ".repeat(9),
    )
    .unwrap();
    let mut args = run.args("tp1", 1, &sets);
    args.extend(["--data".to_string(), data]);
    let ended = Ranks::threads(&args).finish().remove(0);
    let has_line = |start: &str| ended.stdout.lines().any(|line| line.starts_with(start));
    assert!(
        has_line("note     data.validation_fraction is 0: there are no evaluations"),
        "{ended:?}"
    );
    assert!(
        has_line("note     the warm-up of 80 samples is longer than the run of 8"),
        "{ended:?}"
    );
    assert!(
        ended.stdout.lines().any(|line| line == "finished 1 step"),
        "{ended:?}"
    );
    // The sample begins with the first words of the data, not with a prompt about Rust.
    assert!(has_line("sample   It was the"), "{ended:?}");
    let metrics = std::fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    assert!(!metrics.contains("eval_loss"), "{metrics}");
}
