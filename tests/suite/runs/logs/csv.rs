//! Tables of comma-separated values.

use std::fs;

use megaburn::report::{
    logs::{LogOptions, Logs},
    metrics::{EvalMetrics, MetricsRecord, StepMetrics, read_metrics},
};
use megaburn_test_support::run::Run;

use super::{killed_and_resumed, train};

/// The columns of a table, and its rows.
fn table(text: &str) -> (Vec<String>, Vec<Vec<String>>) {
    let mut rows = text
        .lines()
        .map(|line| line.split(',').map(str::to_string).collect::<Vec<_>>());
    let columns = rows.next().unwrap();
    (columns, rows.collect())
}

#[test]
fn a_resumed_run_has_a_row_for_each_step() {
    let run = Run::new();
    let steps = killed_and_resumed(&run, &["log.csv=true"]);
    let (columns, rows) = table(&fs::read_to_string(run.path("run/metrics.csv")).unwrap());
    let column = |name: &str| columns.iter().position(|column| column == name).unwrap();
    assert_eq!(rows.len() as u64, steps);
    for (row, step) in rows.iter().zip(run.steps()) {
        assert_eq!(row.len(), columns.len());
        let cell = |name: &str| row[column(name)].as_str();
        assert_eq!(cell("step"), step.step.to_string());
        assert_eq!(
            cell("loss").parse::<f64>().unwrap().to_bits(),
            step.loss.to_bits()
        );
        assert_eq!(cell("lr").parse::<f64>().unwrap(), step.lr);
        assert_eq!(cell("start_number"), step.start_number.unwrap().to_string());
        assert_eq!(
            cell("consumed_tokens"),
            step.consumed_tokens.unwrap().to_string()
        );
        assert_eq!((cell("mfu"), cell("loss_scale")), ("", ""), "{row:?}");
    }
    let starts = [&rows[0], rows.last().unwrap()].map(|row| row[column("start_number")].clone());
    assert_eq!(starts, ["1", "2"]);
    let (columns, rows) = table(&fs::read_to_string(run.path("run/evaluations.csv")).unwrap());
    assert_eq!(
        columns[..5],
        ["step", "wall_time", "start_number", "data", "eval_loss"]
    );
    let records = read_metrics(run.path("run/metrics.jsonl")).unwrap();
    let evals: Vec<_> = records
        .iter()
        .filter_map(|record| match record {
            MetricsRecord::Eval(eval) => Some(eval.eval_loss.to_string()),
            MetricsRecord::Step(_) => None,
        })
        .collect();
    assert_eq!(
        rows.iter().map(|row| row[4].clone()).collect::<Vec<_>>(),
        evals
    );
}

/// A setting of a later start adds a column, which is empty in earlier rows.
#[test]
fn a_start_with_other_settings_has_their_columns() {
    let run = Run::new();
    train(&run, 2, &["log.csv=true"]);
    train(&run, 4, &["log.csv=true", "train.log_num_zeros=true"]);
    let (columns, rows) = table(&fs::read_to_string(run.path("run/metrics.csv")).unwrap());
    let zeros = columns
        .iter()
        .position(|column| column == "num_zeros")
        .unwrap();
    let is_empty: Vec<bool> = rows.iter().map(|row| row[zeros].is_empty()).collect();
    assert_eq!(is_empty, [true, true, false, false]);
}

#[test]
fn names_with_commas_are_quoted_and_tables_of_others_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let logs = || {
        let options = LogOptions::new(dir.path(), "1f", 0).with_csv(true);
        Logs::open(options, || Ok(Vec::new())).unwrap()
    };
    let first = logs();
    first.write(EvalMetrics {
        step: 1,
        data: Some("web, \"new\"".into()),
        eval_loss: 2.5,
        ..EvalMetrics::default()
    });
    first.write(StepMetrics {
        step: 1,
        loss: f64::NAN,
        ..StepMetrics::default()
    });
    first.finish(0);
    let text = fs::read_to_string(dir.path().join("evaluations.csv")).unwrap();
    assert_eq!(
        text,
        "step,wall_time,start_number,data,eval_loss,consumed_tokens\n1,,,\"web, \"\"new\"\"\",2.5,\n"
    );
    let text = fs::read_to_string(dir.path().join("metrics.csv")).unwrap();
    assert!(text.ends_with("\n1,,,NaN,0,0,0,,0,0,,0,,\n"), "{text}");

    let run = Run::new();
    fs::create_dir_all(run.path("run")).unwrap();
    fs::write(run.path("run/metrics.csv"), "years").unwrap();
    let sets = ["log.csv=true", "run.allow_other_files=true"];
    let ended = super::Ranks::threads(&run.args("tp1", 1, &sets))
        .wait_all()
        .remove(0);
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(
        ended
            .stderr
            .contains("metrics.csv` was not written by a run: move it, or set log.csv"),
        "{ended:#?}"
    );
    assert_eq!(
        fs::read_to_string(run.path("run/metrics.csv")).unwrap(),
        "years"
    );
}
