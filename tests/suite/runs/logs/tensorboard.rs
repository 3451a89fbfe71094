//! Event files of TensorBoard.

use std::{collections::BTreeMap, fs, path::Path};

use megaburn::report::metrics::{MetricsRecord, read_metrics};
use megaburn_test_support::run::Run;

use super::{
    compare_by_script, killed_and_resumed, train,
    wire::{Field, Fields, crc32c},
};

/// The events of a file, after its checksums were verified.
fn events(path: &Path) -> Vec<Fields> {
    let bytes = fs::read(path).unwrap();
    let mut bytes = &bytes[..];
    let mut events = Vec::new();
    while !bytes.is_empty() {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let masked = |data: &[u8]| {
            let crc = crc32c(data);
            crc.rotate_right(15).wrapping_add(0xa282_ead8)
        };
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!(word(8), masked(&bytes[..8]));
        let data = &bytes[12..12 + len];
        assert_eq!(word(12 + len), masked(data));
        events.push(Fields::parse(data));
        bytes = &bytes[16 + len..];
    }
    events
}

/// The event files of a run, in the order in which TensorBoard reads them.
fn files(run: &Run) -> Vec<std::path::PathBuf> {
    let files = fs::read_dir(run.path("run/tensorboard")).unwrap();
    let mut files: Vec<_> = files.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// The values of each tag by step, as TensorBoard shows them: the start of a session drops what is
/// from its step on.
fn shown(run: &Run) -> BTreeMap<String, Vec<(u64, f32)>> {
    let mut shown: BTreeMap<String, Vec<(u64, f32)>> = BTreeMap::new();
    for path in files(run) {
        let events = events(&path);
        assert_eq!(events[0].text(3).as_deref(), Some("brain.Event:2"));
        assert_eq!(events[1].messages(7)[0].number(1), Some(1), "a START");
        for event in events {
            let step = event.number(2).unwrap();
            if !event.messages(7).is_empty() {
                shown
                    .values_mut()
                    .for_each(|values| values.retain(|(of, _)| *of < step));
            }
            for summary in event.messages(5) {
                for value in summary.messages(1) {
                    let Some(Field::Float(number)) = value.all(2).next() else {
                        panic!("{value:?}");
                    };
                    let of_tag = shown.entry(value.text(1).unwrap()).or_default();
                    of_tag.push((step, *number));
                }
            }
        }
    }
    shown
}

/// What `metrics.jsonl` has under a tag.
fn recorded(run: &Run, tag: &str) -> Vec<(u64, f32)> {
    let records = read_metrics(run.path("run/metrics.jsonl")).unwrap();
    let value = |record: &MetricsRecord| match (record, tag) {
        (MetricsRecord::Step(step), "train/loss") => Some(step.loss),
        (MetricsRecord::Step(step), "train/lr") => Some(step.lr),
        (MetricsRecord::Step(step), "train/consumed_tokens") => {
            Some(step.consumed_tokens.unwrap() as f64)
        }
        (MetricsRecord::Eval(eval), "eval/loss") => Some(eval.eval_loss),
        _ => None,
    };
    let values = records
        .iter()
        .filter_map(|record| Some((record.step(), value(record)?)));
    values.map(|(step, value)| (step, value as f32)).collect()
}

#[test]
fn a_resumed_run_has_each_step_once() {
    let run = Run::new();
    killed_and_resumed(&run, &["log.tensorboard=true"]);
    assert_eq!(files(&run).len(), 2);
    let shown = shown(&run);
    for tag in [
        "train/loss",
        "train/lr",
        "train/consumed_tokens",
        "eval/loss",
    ] {
        let recorded = recorded(&run, tag);
        assert!(!recorded.is_empty(), "{tag}");
        assert_eq!(shown[tag], recorded, "{tag}");
    }
    compare_by_script("tensorboard_logs.py", "tensorboard", &run.path("run"));
}

/// Of a run that was begun without event files, the first one has all steps.
#[test]
fn event_files_begin_with_what_the_metrics_have() {
    let run = Run::new();
    train(&run, 3, &[]);
    assert!(!run.path("run/tensorboard").exists());
    train(&run, 5, &["log.tensorboard=true"]);
    let steps: Vec<u64> = shown(&run)["train/loss"]
        .iter()
        .map(|(step, _)| *step)
        .collect();
    assert_eq!(steps, [1, 2, 3, 4, 5]);
    // Another run in the folder has none of them.
    let fresh = [
        &run.args("tp1", 2, &["log.tensorboard=true"])[..],
        &["--fresh".into()],
    ]
    .concat();
    super::Ranks::threads(&fresh).finish();
    let steps: Vec<u64> = shown(&run)["train/loss"]
        .iter()
        .map(|(step, _)| *step)
        .collect();
    assert_eq!(steps, [1, 2]);
}
