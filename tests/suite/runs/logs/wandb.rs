//! Offline runs of Weights & Biases.

use std::{collections::BTreeMap, fs, path::PathBuf};

use megaburn::report::{
    logs::{LogOptions, Logs, WandbOptions},
    metrics::{MetricsRecord, StepMetrics, read_metrics},
};
use megaburn_test_support::run::Run;
use serde_json::{Value, json};

use super::{
    compare_by_script, killed_and_resumed,
    wire::{Fields, crc32},
};

/// The records of a log: parts in blocks of 32 KiB, of which the first begins with a header.
fn records(path: &std::path::Path) -> Vec<Fields> {
    let bytes = fs::read(path).unwrap();
    assert_eq!(bytes[..7], *b":W&B\xe1\xbe\x00");
    let (mut at, mut record, mut records) = (7, Vec::new(), Vec::new());
    while at < bytes.len() {
        let left = 32768 - at % 32768;
        if left < 7 {
            at += left;
            continue;
        }
        let crc = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let len = usize::from(u16::from_le_bytes(
            bytes[at + 4..at + 6].try_into().unwrap(),
        ));
        assert!(7 + len <= left, "a part ends with its block");
        assert_eq!(crc, crc32(&bytes[at + 6..at + 7 + len]));
        let kind = bytes[at + 6];
        assert_eq!(record.is_empty(), kind == 1 || kind == 2, "at {at}");
        record.extend(&bytes[at + 7..at + 7 + len]);
        if kind == 1 || kind == 4 {
            records.push(Fields::parse(&std::mem::take(&mut record)));
        }
        at += 7 + len;
    }
    let numbers: Vec<u64> = records
        .iter()
        .map(|record| record.number(1).unwrap())
        .collect();
    assert_eq!(numbers, (1..=records.len() as u64).collect::<Vec<_>>());
    records
}

/// The values of the items of a history or a summary.
fn items(record: &Fields) -> BTreeMap<String, Value> {
    let item = |item: Fields| {
        let json = item.text(16).unwrap().replace("NaN", "null");
        (item.text(2).unwrap(), serde_json::from_str(&json).unwrap())
    };
    record.messages(1).into_iter().map(item).collect()
}

/// The only log of a run.
fn log(dir: PathBuf) -> PathBuf {
    let only = |dir: PathBuf| {
        let mut entries = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let first = entries.next().unwrap();
        assert_eq!(entries.next(), None);
        first
    };
    only(only(dir.join("wandb")))
}

#[test]
fn a_resumed_run_has_each_step_once_in_one_log() {
    let run = Run::new();
    killed_and_resumed(&run, &["log.wandb=true", "log.wandb_project=mine"]);
    let records = records(&log(run.path("run")));
    let about = records[1].messages(17).remove(0);
    assert_eq!(about.text(3).as_deref(), Some("mine"));
    assert_eq!(about.text(8).as_deref(), Some("run"));
    let config = about.messages(4).remove(0).messages(1);
    let model = config
        .iter()
        .find(|item| item.text(1).as_deref() == Some("model"))
        .unwrap();
    let model: Value = serde_json::from_str(&model.text(16).unwrap()).unwrap();
    assert_eq!(model["hidden"], 32);
    let rows: Vec<_> = records
        .iter()
        .flat_map(|record| record.messages(2))
        .collect();
    let steps = run.steps();
    assert_eq!(rows.len(), steps.len());
    for (row, step) in rows.iter().zip(&steps) {
        assert_eq!(row.messages(2)[0].number(1), Some(step.step));
        let items = items(row);
        assert_eq!(items["_step"], json!(step.step));
        assert_eq!(items["train/loss"].as_f64(), Some(step.loss));
        assert_eq!(items["_timestamp"].as_f64(), step.wall_time);
    }
    let evals: Vec<f64> = rows
        .iter()
        .filter_map(|row| items(row).get("eval/loss").and_then(Value::as_f64))
        .collect();
    let recorded = read_metrics(run.path("run/metrics.jsonl")).unwrap();
    let eval = |record: &MetricsRecord| match record {
        MetricsRecord::Eval(eval) => Some(eval.eval_loss),
        MetricsRecord::Step(_) => None,
    };
    assert_eq!(evals, recorded.iter().filter_map(eval).collect::<Vec<_>>());
    let summaries: Vec<_> = records
        .iter()
        .flat_map(|record| record.messages(3))
        .collect();
    let last = items(summaries.last().unwrap());
    assert_eq!(
        last["train/loss"].as_f64(),
        Some(steps.last().unwrap().loss)
    );
    let exit = records.last().unwrap().messages(18).remove(0);
    assert_eq!(exit.number(1), Some(0));
    compare_by_script(
        "wandb_logs.py",
        "wandb.proto.wandb_internal_pb2",
        &run.path("run"),
    );
}

/// Records that are longer than a block, and that end everywhere in one.
#[test]
fn records_of_any_length_are_cut_at_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let long = "a".repeat(70_000);
    let wandb = WandbOptions {
        project: "mine".into(),
        config: [("text".to_string(), json!(long))].into_iter().collect(),
    };
    let options = LogOptions::new(dir.path(), "0123456789abcdef", 0).with_wandb(Some(wandb));
    let logs = Logs::open(options, || Ok(Vec::new())).unwrap();
    for step in 1..=300 {
        let name = "n".repeat(step as usize % 40);
        logs.write(StepMetrics {
            step,
            loss: 1.0 / step as f64,
            task: [(name, f64::NAN)].into(),
            ..StepMetrics::default()
        });
    }
    logs.finish(3);
    let path = log(dir.path().into());
    assert_eq!(path.file_name().unwrap(), "run-0123456789ab.wandb");
    let records = records(&path);
    // A header, the run, a summary and a row for each step, the end.
    assert_eq!(records.len(), 2 + 2 * 300 + 1);
    assert_eq!(records.last().unwrap().messages(18)[0].number(1), Some(3));
}
