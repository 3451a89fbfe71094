//! `megaburn checkpoint show`.

use std::{collections::BTreeMap, fs, path::PathBuf, time::SystemTime};

use clap::Args;
use megaburn_checkpoint::{Checkpoint, FileInfo, TensorHeader, TensorSource};
use megaburn_report::console::human_number;
use megaburn_train::{TrainError, time::utc};
use serde_json::{Value, json};

use super::{
    super::print,
    model::describe,
    pattern::TensorPattern,
    place,
    state_keys::by_key,
    table::Table,
    tensor_table::print_tensors,
    units::{age_text, counted, shortened, size},
};

/// Files that are listed one by one.
const MOST_FILES: usize = 16;
/// Characters of a value of the trainer's state.
const LONGEST: usize = 80;

#[derive(Args)]
pub(in crate::cli) struct ShowArgs {
    /// A checkpoint, or a run, whose newest whole checkpoint is taken.
    #[arg(value_name = "CHECKPOINT")]
    path: PathBuf,
    /// Also list the tensors; with a pattern, only those whose full names match, such as `model.*`.
    #[arg(long, value_name = "PATTERN", num_args = 0..=1, default_missing_value = "*")]
    tensors: Option<TensorPattern>,
    /// Also compute statistics of the tensors, as `stats` does.
    #[arg(long)]
    statistics: bool,
    /// Print only JSON on stdout: an object for the checkpoint, and one per line for each tensor.
    #[arg(long)]
    json: bool,
}

impl ShowArgs {
    pub(super) fn run(self) -> Result<(), TrainError> {
        let checkpoint = place::open(&self.path)?;
        let pattern = self
            .tensors
            .or_else(|| self.statistics.then(TensorPattern::all));
        // A pattern without a match is an error before anything is printed.
        let selection = pattern
            .map(|pattern| pattern.select(&checkpoint))
            .transpose()?;
        if self.json {
            print::result(summary_json(&checkpoint))?;
        } else {
            summary(&checkpoint)
                .into_iter()
                .try_for_each(print::result)?;
        }
        let Some(selection) = selection else {
            return Ok(());
        };
        if !self.json {
            print::result("")?;
        }
        print_tensors(&checkpoint, &selection, self.statistics, self.json)
    }
}

/// The tensors of one kind and element type.
#[derive(Debug, Default)]
struct Group {
    tensors: usize,
    elements: u64,
    bytes: u64,
}

/// The tensors by kind (`model`, or the name of an optimizer state) and element type.
fn groups(checkpoint: &Checkpoint) -> BTreeMap<(String, &'static str), Group> {
    let mut groups: BTreeMap<_, Group> = BTreeMap::new();
    for TensorHeader { name, dtype, shape } in checkpoint.headers() {
        let kind = name.split('.').next().unwrap_or_default().to_string();
        let group = groups.entry((kind, dtype.name())).or_default();
        let elements = shape.iter().product::<usize>() as u64;
        group.tensors += 1;
        group.elements += elements;
        group.bytes += elements * dtype.size() as u64;
    }
    groups
}

fn saved(checkpoint: &Checkpoint) -> Option<SystemTime> {
    let manifest = fs::metadata(checkpoint.path().join("manifest.json"));
    manifest.and_then(|found| found.modified()).ok()
}

/// The trainer's state by keys, without the configuration, and without the magnitudes of each matrix
/// (`--json` has them).
fn trainer(checkpoint: &Checkpoint) -> BTreeMap<String, Value> {
    let mut state = checkpoint.trainer().clone();
    if let Some(state) = state.as_object_mut() {
        state.shift_remove("config");
        if let Some(amaxes) = state.get_mut("amaxes") {
            let num = amaxes.as_object().map_or(0, serde_json::Map::len);
            *amaxes = format!("of {num} matrices").into();
        }
    }
    by_key("", &state)
}

/// What a checkpoint holds, as lines of text.
fn summary(checkpoint: &Checkpoint) -> Vec<String> {
    let manifest = checkpoint.manifest();
    let saved = saved(checkpoint).map_or_else(String::new, |time| {
        format!(", saved {}, {} ago", utc(time), age_text(time))
    });
    let writer = match &manifest.run_id {
        Some(run) => format!(" of run {run}"),
        None => String::new(),
    };
    let mut lines = vec![
        checkpoint.path().display().to_string(),
        format!("step     {}{writer}{saved}", manifest.step),
        format!("layout   {}, format {}", manifest.layout, manifest.format),
        format!("model    {}", describe(&manifest.model)),
    ];
    lines.extend(titled("tensors", tensor_lines(checkpoint)));
    lines.extend(titled("files", file_lines(&manifest.files)));
    lines.extend(titled("trainer", trainer_lines(checkpoint)));
    lines
}

/// Lines with a title before the first, and space before the others.
fn titled(title: &str, lines: Vec<String>) -> Vec<String> {
    let title = |number| if number == 0 { title } else { "" };
    let lines = lines.into_iter().enumerate();
    lines
        .map(|(number, line)| format!("{:9}{line}", title(number)))
        .collect()
}

fn tensor_lines(checkpoint: &Checkpoint) -> Vec<String> {
    let mut table = Table::new([false, false, true, true, true]);
    for ((kind, dtype), group) in groups(checkpoint) {
        let elements = human_number(group.elements as f64);
        table.push([
            kind,
            dtype.to_string(),
            counted(group.tensors, "tensor"),
            format!("{elements} elements"),
            size(group.bytes),
        ]);
    }
    table.lines()
}

/// The files with their shares of all bytes; of many files, the smallest and the largest.
fn file_lines(files: &[FileInfo]) -> Vec<String> {
    let all: u64 = files.iter().map(|file| file.bytes).sum();
    let mut by_size: Vec<_> = files.iter().collect();
    by_size.sort_by_key(|file| file.bytes);
    let (Some(smallest), Some(largest)) = (by_size.first(), by_size.last()) else {
        return vec!["none".into()];
    };
    let share = |file: &FileInfo| format!("{:.1}%", 100.0 * file.bytes as f64 / all.max(1) as f64);
    let mut lines = vec![format!(
        "{} of {}; the smallest has {}, the largest {}",
        counted(files.len(), "file"),
        size(all),
        share(smallest),
        share(largest)
    )];
    let listed: Vec<&FileInfo> = match files.len() {
        0..=MOST_FILES => files.iter().collect(),
        _ => vec![smallest, largest],
    };
    let mut table = Table::new([false, true, true, true]);
    for file in listed {
        let pieces = counted(file.pieces.len(), "piece");
        table.push([file.name.clone(), size(file.bytes), share(file), pieces]);
    }
    lines.extend(table.lines());
    lines
}

fn trainer_lines(checkpoint: &Checkpoint) -> Vec<String> {
    if checkpoint.trainer().is_null() {
        return vec!["none: it holds only weights".into()];
    }
    let mut table = Table::new([false, false]);
    let set = trainer(checkpoint).into_iter();
    for (key, value) in set.filter(|(_, value)| !value.is_null()) {
        let value = match value {
            Value::String(text) => text,
            value => value.to_string(),
        };
        table.push([key, shortened(&value, LONGEST)]);
    }
    table.lines()
}

fn summary_json(checkpoint: &Checkpoint) -> Value {
    let manifest = checkpoint.manifest();
    let group = |((kind, dtype), group): ((String, &str), Group)| {
        json!({
            "kind": kind,
            "dtype": dtype,
            "tensors": group.tensors,
            "elements": group.elements,
            "bytes": group.bytes,
        })
    };
    let file = |file: &FileInfo| json!({"name": file.name, "bytes": file.bytes, "pieces": file.pieces.len()});
    json!({
        "kind": "checkpoint",
        "path": checkpoint.path().display().to_string(),
        "step": manifest.step,
        "run_id": manifest.run_id,
        "saved": saved(checkpoint).map(utc),
        "layout": manifest.layout,
        "format": manifest.format,
        "model": manifest.model,
        "trainer": manifest.trainer,
        "tensors": groups(checkpoint).into_iter().map(group).collect::<Vec<_>>(),
        "files": manifest.files.iter().map(file).collect::<Vec<_>>(),
    })
}
