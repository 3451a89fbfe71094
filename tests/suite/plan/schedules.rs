//! `megaburn plan --schedule` on the command line.

use std::fs;

use megaburn::pipeline::ScheduleKind;
use rstest::rstest;

use crate::runs::child::{Ended, Ranks};

fn plan(args: &str) -> Ended {
    let args: Vec<&str> = ["plan"]
        .into_iter()
        .chain(args.split_whitespace())
        .collect();
    Ranks::command(&args).wait_all().remove(0)
}

#[test]
fn a_schedule_is_drawn_with_its_numbers() {
    let ended = plan("--schedule 1f1b --pp 3 --micro-batches 4");
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let expected = "\
rank 0 | F0 F1 F2 .  .  .  .  B0 =  F3 B1 =  .  B2 =  .  B3 =
rank 1 | .  F0 F1 .  .  B0 =  F2 B1 =  F3 B2 =  .  B3 =  .  .
rank 2 | .  .  F0 B0 =  F1 B1 =  F2 B2 =  F3 B3 =  .  .  .  .

schedule 1f1b: p 3 ranks, v 1 chunks each, m 4 micro-batches
stages   [0] [1] [2]
passes   F forward, 1 unit; B backward, 2 units
time     18 units, 12 computing, 6 idle (33.3%); 6 at most between a rank's first and last pass
bubble   0.5000 of the computing time; 0.5000 by formula, which is (p-1)/m for m large enough
peak     [3, 2, 1] micro-batches of a chunk kept by rank; min(m, p-r)
";
    assert_eq!(ended.stdout, expected);
}

#[test]
fn every_kind_is_drawn_and_written() {
    let dir = tempfile::tempdir().unwrap();
    for kind in ScheduleKind::ALL {
        let file = dir.path().join(format!("{kind}.svg"));
        let ended = plan(&format!(
            "--schedule {kind} --pp 4 --micro-batches 9 --svg {}",
            file.display()
        ));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(
            ended
                .stdout
                .contains(&format!("schedule {kind}: p 4 ranks")),
            "{ended:?}"
        );
        let picture = fs::read_to_string(file).unwrap();
        assert!(picture.starts_with("<svg ") && picture.contains(&format!("{kind}: 4 ranks")));
    }
}

#[rstest]
#[case(
    "interleaved --pp 4 --chunks 3 --micro-batches 9",
    "m 9 micro-batches, groups of 5\nstages   [0, 4, 8] [1, 5, 9]"
)]
#[case("interleaved --pp 2 --micro-batches 5 --group 3", "groups of 3")]
#[case(
    "forward-only --pp 2 --chunks 2 --micro-batches 3 --placement vee",
    "stages   [0, 3] [1, 2]"
)]
fn what_is_asked_for_is_drawn(#[case] args: &str, #[case] expected: &str) {
    let ended = plan(&format!("--schedule {args}"));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains(expected), "{ended:?}");
}

#[rstest]
#[case(
    "zb-h2 --pp 2 --micro-batches 3",
    "unknown schedule `zb-h2`: expected one of gpipe, 1f1b, "
)]
#[case("1f1b --pp 0 --micro-batches 3", "the schedule has 0 ranks")]
#[case(
    "zb-v --pp 2 --micro-batches 3 --chunks 3",
    "zb-v with 3 chunks per rank: it has 2"
)]
#[case(
    "interleaved --pp 4 --micro-batches 9 --group 4",
    "9 micro-batches in groups of 4 leave 1, but a pipeline of 4 ranks needs 0 or at least 4"
)]
#[case(
    "gpipe --pp 9000000000 --micro-batches 9000000000",
    "more than 1048576 forward passes"
)]
fn what_cannot_be_drawn_is_named(#[case] args: &str, #[case] message: &str) {
    let ended = plan(&format!("--schedule {args}"));
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(
        ended.stderr.contains("error: ") && ended.stderr.contains(message),
        "{ended:?}"
    );
    assert!(
        !ended.stderr.contains("panicked") && ended.stdout.is_empty(),
        "{ended:?}"
    );
}

#[test]
fn a_picture_that_cannot_be_written_is_named() {
    let ended = plan("--schedule zb-v --pp 2 --micro-batches 4 --svg /no/such/plan.svg");
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(
        ended
            .stderr
            .contains("error: cannot write `/no/such/plan.svg`: "),
        "{ended:?}"
    );
}
