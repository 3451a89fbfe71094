//! What happened to a run.

use std::collections::VecDeque;

use serde::Serialize;
use serde_json::{Map, Value};

use super::mark::Sums;

/// The most events of an answer; older ones are left out.
const MOST: usize = 1000;
/// The longest text of an event, in characters.
const LONGEST: usize = 300;

/// Something that happened after a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Event {
    pub(super) step: u64,
    tokens: f64,
    seconds: f64,
    pub(super) kind: &'static str,
    pub(super) text: String,
    /// When it happened, if the line says so.
    time: Option<String>,
}

/// The newest events.
#[derive(Debug, Default)]
pub(super) struct Events {
    events: VecDeque<Event>,
    left_out: usize,
}

impl Events {
    pub(super) fn add(&mut self, step: u64, sums: &Sums, kind: &'static str, text: String) {
        self.push(step, sums, kind, text, None);
    }

    fn push(
        &mut self,
        step: u64,
        sums: &Sums,
        kind: &'static str,
        text: String,
        time: Option<String>,
    ) {
        if self.events.len() == MOST {
            self.events.pop_front();
            self.left_out += 1;
        }
        let text = match text.char_indices().nth(LONGEST) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text,
        };
        let (tokens, seconds) = (sums.tokens, sums.seconds);
        self.events.push_back(Event {
            step,
            tokens,
            seconds,
            kind,
            text,
            time,
        });
    }

    /// Number of events that are left out.
    pub(super) fn left_out(&self) -> usize {
        self.left_out
    }

    /// The events that stay.
    pub(super) fn kept(self) -> Vec<Event> {
        self.events.into()
    }

    /// Adds a line that is neither a step nor an evaluation, after `step`.
    pub(super) fn add_line(&mut self, line: &Map<String, Value>, step: u64, sums: &Sums) {
        let number = |key: &str| line.get(key).and_then(Value::as_u64);
        let text = |key: &str| line.get(key).and_then(Value::as_str).unwrap_or_default();
        let time = line.get("time").and_then(Value::as_str).map(String::from);
        if let Some(start) = number("start") {
            let from = number("from_step").unwrap_or(0);
            let (kind, what) = match from {
                0 => ("start", format!("start {start}, layout {}", text("layout"))),
                from => (
                    "resume",
                    format!("start {start} after step {from}, layout {}", text("layout")),
                ),
            };
            let cause = line.get("cause").and_then(Value::as_str);
            let restart = number("restart").map(|restart| match cause {
                Some(cause) => format!("restart {restart}: {cause}"),
                None => format!("restart {restart}"),
            });
            let changes = line.get("changes").and_then(Value::as_array);
            let changes = changes.into_iter().flatten().map(change);
            let what = [what]
                .into_iter()
                .chain(restart)
                .chain(changes)
                .collect::<Vec<_>>()
                .join("; ");
            self.push(from, sums, kind, what, time);
        } else if let Some(saved) = number("checkpoint") {
            let what = format!("checkpoint of step {saved}{}", cost(line));
            self.push(saved, sums, "checkpoint", what, time);
        } else if let Some(stored) = number("stored_checkpoint") {
            let what = format!(
                "checkpoint of step {stored} uploaded to {}{}",
                text("url"),
                cost(line)
            );
            self.push(stored, sums, "upload", what, time);
        } else if let (Some(spike), Some(to)) = (number("rollback"), number("to_step")) {
            let what = format!("rolled back to step {to} after the spike of step {spike}");
            self.push(spike, sums, "rollback", what, time);
        } else if let (Some(step), Some(rank)) = (number("straggler"), number("rank")) {
            let slower = line.get("slower").and_then(Value::as_f64).unwrap_or(0.0);
            let gpu = number("gpu").map_or(String::new(), |gpu| format!(", GPU {gpu}"));
            let what = format!(
                "rank {rank} (host {}{gpu}) is {:.0}% slower than the others, mostly in `{}`",
                text("host"),
                100.0 * slower,
                text("section")
            );
            self.push(step, sums, "straggler", what, time);
        } else if let Some(step) = number("gpu_health") {
            let events = line.get("events").and_then(Value::as_array);
            for event in events.into_iter().flatten() {
                let text = |key: &str| event[key].as_str().unwrap_or_default();
                let what = format!(
                    "rank {} (host {}, GPU {}): {}",
                    event["rank"],
                    text("host"),
                    event["gpu"],
                    text("what")
                );
                self.push(step, sums, "GPU", what, time.clone());
            }
        } else {
            let kind = match text("event") {
                "spike" => "spike",
                _ => "note",
            };
            let what = Value::from(line.clone()).to_string();
            self.push(number("step").unwrap_or(step), sums, kind, what, time);
        }
    }
}

/// A changed key of a start.
fn change(change: &Value) -> String {
    let text = |key: &str| match &change[key] {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    format!("{}: {} → {}", text("key"), text("old"), text("new"))
}

/// How long a checkpoint took, and its size.
fn cost(line: &Map<String, Value>) -> String {
    let number = |key: &str| line.get(key).and_then(Value::as_f64);
    let seconds = number("seconds").map(|seconds| format!("{seconds:.1} s"));
    let waited = number("waited_seconds").map(|seconds| format!("training waited {seconds:.1} s"));
    let bytes = number("bytes").map(size);
    let parts: Vec<_> = [bytes, seconds, waited].into_iter().flatten().collect();
    match parts.is_empty() {
        true => String::new(),
        false => format!(" ({})", parts.join(", ")),
    }
}

/// A number of bytes in the unit that fits.
fn size(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = (bytes.max(1.0).log2() / 10.0) as usize;
    let power = power.min(units.len() - 1);
    format!(
        "{:.1} {}",
        bytes / 1024_f64.powi(power as i32),
        units[power]
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_of_each_kind_are_named() {
        let lines = [
            json!({"start": 1, "run_id": "1f", "time": "T", "layout": "tp2", "from_step": 0, "changes": []}),
            json!({"start": 2, "layout": "tp1", "from_step": 5, "changes": [{"key": "a.b", "old": "1", "new": "2"}]}),
            json!({"start": 3, "layout": "tp1", "from_step": 6, "restart": 1,
                "cause": "rank 3 was killed by SIGKILL", "changes": []}),
            json!({"checkpoint": 7, "seconds": 0.25, "waited_seconds": 0.0, "bytes": 1 << 21}),
            json!({"stored_checkpoint": 7, "url": "s3://b/a"}),
            json!({"event": "spike", "step": 8}),
            json!({"rollback": 8, "to_step": 4, "samples": [32, 64]}),
            json!({"straggler": 60, "rank": 3, "host": "h1", "gpu": 2, "section": "data", "slower": 0.104}),
            json!({"gpu_health": 70, "events": []}),
            json!({"gpu_health": 80, "events": [{"rank": 3, "host": "h1", "gpu": 2, "what": "hot"}]}),
            json!({"mine": "…".repeat(400)}),
        ];
        let mut events = Events::default();
        for line in &lines {
            events.add_line(line.as_object().unwrap(), 9, &Sums::default());
        }
        let kept = events.kept();
        let found: Vec<_> = kept
            .iter()
            .map(|event| (event.kind, event.step, event.text.as_str()))
            .collect();
        assert_eq!(
            found[..9],
            [
                ("start", 0, "start 1, layout tp2"),
                ("resume", 5, "start 2 after step 5, layout tp1; a.b: 1 → 2"),
                (
                    "resume",
                    6,
                    "start 3 after step 6, layout tp1; restart 1: rank 3 was killed by SIGKILL"
                ),
                (
                    "checkpoint",
                    7,
                    "checkpoint of step 7 (2.0 MiB, 0.2 s, training waited 0.0 s)"
                ),
                ("upload", 7, "checkpoint of step 7 uploaded to s3://b/a"),
                ("spike", 8, r#"{"event":"spike","step":8}"#),
                (
                    "rollback",
                    8,
                    "rolled back to step 4 after the spike of step 8"
                ),
                (
                    "straggler",
                    60,
                    "rank 3 (host h1, GPU 2) is 10% slower than the others, mostly in `data`"
                ),
                ("GPU", 80, "rank 3 (host h1, GPU 2): hot"),
            ]
        );
        assert_eq!(
            (found[9].0, found[9].1, found[9].2.chars().count()),
            ("note", 9, LONGEST + 1)
        );
        assert_eq!(kept[0].time.as_deref(), Some("T"));
    }

    #[test]
    fn of_too_many_events_the_newest_stay() {
        let mut events = Events::default();
        for step in 0..MOST as u64 + 5 {
            events.add(step, &Sums::default(), "skipped", String::new());
        }
        assert_eq!(events.left_out(), 5);
        assert_eq!(events.kept()[0].step, 5);
    }
}
