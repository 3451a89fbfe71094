use rstest::rstest;

use super::*;
use crate::metrics::{example_eval, example_step, read_metrics};

fn steps(path: &Path) -> Vec<u64> {
    read_metrics(path)
        .unwrap()
        .iter()
        .map(MetricsRecord::step)
        .collect()
}

fn open(path: &Path, step: u64) -> MetricsWriter {
    MetricsWriter::open(path, step, "1f").unwrap()
}

fn run_to(path: &Path, from: u64, to: u64) {
    let mut writer = open(path, from);
    for step in from + 1..=to {
        writer.write(example_step(step, 1.0 / step as f64)).unwrap();
        if step % 2 == 0 {
            writer.write(example_eval(step, 0.5)).unwrap();
        }
    }
}

#[rstest]
#[case(0, &[])]
#[case(1, &[1])]
#[case(2, &[1, 2, 2])]
#[case(3, &[1, 2, 2, 3])]
#[case(9, &[1, 2, 2, 3, 4, 4])]
fn resuming_keeps_the_lines_up_to_the_checkpoint(#[case] step: u64, #[case] kept: &[u64]) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    run_to(&path, 0, 4);
    let evaluated = kept.iter().copied().filter(|step| step % 2 == 0).max();
    let found = open(&path, step).found().evaluated;
    assert_eq!(found.map(|found| found.step), evaluated);
    assert_eq!(steps(&path), kept);
    let names: Vec<_> = fs::read_dir(&dir)
        .unwrap()
        .map(|f| f.unwrap().file_name())
        .collect();
    assert_eq!(names, ["metrics.jsonl"]);
}

#[test]
fn a_resumed_file_equals_that_of_a_run_that_never_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let whole = dir.path().join("whole");
    let resumed = dir.path().join("resumed");
    run_to(&whole, 0, 9);
    run_to(&resumed, 0, 7);
    run_to(&resumed, 5, 9);
    assert_eq!(fs::read(whole).unwrap(), fs::read(resumed).unwrap());
}

#[test]
fn a_file_torn_at_any_byte_is_cut_to_its_whole_lines_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    run_to(&path, 0, 3);
    let bytes = fs::read(&path).unwrap();
    for length in 0..bytes.len() {
        fs::write(&path, &bytes[..length]).unwrap();
        let whole = bytes[..length]
            .iter()
            .filter(|&&byte| byte == b'\n')
            .count();
        open(&path, 9).write(example_step(10, 1.0)).unwrap();
        let steps = steps(&path);
        assert_eq!(
            (steps.len(), steps[whole]),
            (whole + 1, 10),
            "cut at {length}"
        );
    }
}

#[test]
fn lines_that_no_run_wrote_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let eval = |step: u64| format!("{{\"step\":{step},\"eval_loss\":1.0}}\n");
    let web = "{\"step\":2,\"data\":\"web\",\"eval_loss\":1.0}\n";
    let mine = "{\"note\":\"mine\"}\n";
    let start = "{\"start\":1,\"run_id\":\"1f\"}\n";
    let other = "{\"start\":1,\"run_id\":\"2e\"}\n";
    let text = [
        &eval(1),
        "my notes\n",
        start,
        &eval(3),
        "\0\0\n",
        mine,
        other,
        &eval(2),
        web,
        &eval(1),
        "the end",
    ];
    fs::write(&path, text.concat()).unwrap();
    let expected = FoundLines {
        starts: 1,
        evaluated: Some(EvaluatedStep {
            step: 2,
            data: vec![None, Some("web".into())],
        }),
        evals: [eval(1).as_str(), &eval(2), web, &eval(1)]
            .map(|line| serde_json::from_str(line).unwrap())
            .into(),
        other_lines: 3,
    };
    assert_eq!(open(&path, 2).found(), expected);
    let kept = [&eval(1), start, mine, &eval(2), web, &eval(1)].concat();
    assert_eq!(fs::read_to_string(&path).unwrap(), kept);
    let others = dir.path().join(OTHER_LINES);
    assert_eq!(
        fs::read_to_string(&others).unwrap(),
        "my notes\n\0\0\nthe end\n"
    );
    assert_eq!(
        open(&path, 0).found(),
        FoundLines {
            starts: 1,
            ..FoundLines::default()
        }
    );
    assert_eq!(fs::read_to_string(&path).unwrap(), [start, mine].concat());
    assert!(fs::read_to_string(&others).unwrap().ends_with("the end\n"));
}

#[test]
fn a_line_is_in_the_file_as_soon_as_it_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut writer = open(&path, 0);
    for step in 1..=3 {
        writer.write(example_step(step, f64::NAN)).unwrap();
        assert_eq!(steps(&path).len() as u64, step);
    }
}

#[test]
fn a_file_that_was_removed_is_written_anew_and_one_that_was_replaced_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut writer = open(&path, 0);
    for step in 1..=4 {
        match step {
            2 => fs::remove_file(&path).unwrap(),
            4 => {
                fs::write(
                    dir.path().join("edited"),
                    "{\"step\":3,\"eval_loss\":1.0}\n",
                )
                .unwrap();
                fs::rename(dir.path().join("edited"), &path).unwrap();
            }
            _ => {}
        }
        writer.write(example_step(step, 1.0)).unwrap();
        let expected: &[u64] = if step == 4 {
            &[3, 4]
        } else {
            &[1, 2, 3][..step as usize]
        };
        assert_eq!(steps(&path), expected);
    }
    writer.sync().unwrap();
}

#[test]
fn a_line_that_cannot_be_written_waits_and_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run/metrics.jsonl");
    fs::create_dir(dir.path().join("run")).unwrap();
    let mut writer = open(&path, 0);
    writer.write(example_step(1, 1.0)).unwrap();
    // The folder is missing for a while.
    fs::rename(dir.path().join("run"), dir.path().join("away")).unwrap();
    for step in 2..=3 {
        let error = writer.write(example_step(step, 1.0)).unwrap_err();
        assert!(error.to_string().starts_with("cannot write `"), "{error}");
        assert_eq!(writer.num_waiting() as u64, step - 1);
    }
    fs::rename(dir.path().join("away"), dir.path().join("run")).unwrap();
    writer.write(example_step(4, 1.0)).unwrap();
    assert_eq!((steps(&path), writer.num_waiting()), (vec![1, 2, 3, 4], 0));
}

#[test]
fn a_folder_that_does_not_exist_is_an_error_with_the_path() {
    let error = MetricsWriter::open("/no/such/folder/metrics.jsonl", 0, "1f").unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("cannot write `/no/such/folder/metrics.jsonl`: ")
    );
    assert!(matches!(error, ReportError::Write { .. }), "{error:?}");
}
