//! What a run has done, by its metrics.

use std::{fs, path::Path};

use serde_json::Value;

/// What the metrics of a run say.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress {
    pub(crate) starts: Vec<Start>,
    pub(crate) step: u64,
}

/// A start of the ranks.
#[derive(Clone, Debug)]
pub(crate) struct Start {
    /// The step from which it continued.
    pub(crate) from_step: u64,
    /// With fewer hosts, its data-parallel size is smaller.
    layout: String,
}

impl Progress {
    /// What a run has done so far.
    pub(crate) fn of(run: &Path) -> Self {
        let text = fs::read(run.join("metrics.jsonl")).unwrap_or_default();
        let mut progress = Self::default();
        for line in String::from_utf8_lossy(&text).lines() {
            let Ok(line) = serde_json::from_str::<Value>(line) else {
                continue;
            };
            let number = |key: &str| line.get(key).and_then(Value::as_u64);
            if number("start").is_some() {
                let layout = line.get("layout").and_then(Value::as_str);
                progress.starts.push(Start {
                    from_step: number("from_step").unwrap_or(0),
                    layout: layout.unwrap_or_default().to_string(),
                });
            } else if let (Some(step), Some(_)) = (number("step"), line.get("loss")) {
                progress.step = step;
            }
        }
        progress
    }

    /// Whether all ranks of the first start train.
    pub(crate) fn is_whole(&self) -> bool {
        let layout = |start: Option<&Start>| start.map(|start| start.layout.clone());
        layout(self.starts.first()) == layout(self.starts.last())
    }
}
