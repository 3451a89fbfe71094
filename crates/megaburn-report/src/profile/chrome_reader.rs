//! Reads the file that [`write_chrome`](super::write_chrome) wrote.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::Path,
};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use super::{
    chrome::{FIRST_STREAM_ROW, FORMAT, FORMAT_KEY},
    trace::{CallRecord, GpuRecord, RankTrace, SpanRecord, Trace},
};
use crate::error::ReportError;

#[derive(Deserialize)]
struct File {
    #[serde(rename = "megaburn_trace")]
    format: u64,
    steps: [u64; 2],
    run_id: String,
    layout: String,
    notes: Vec<String>,
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
}

#[derive(Deserialize)]
struct Event {
    ph: String,
    #[serde(default)]
    cat: String,
    name: String,
    pid: usize,
    tid: u32,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    id: u64,
    #[serde(default)]
    args: Map<String, Value>,
}

/// Reads a profile from the file at `path`.
///
/// # Errors
/// The file cannot be read, or was not written by [`write_chrome`](super::write_chrome).
pub fn read_chrome(path: &Path) -> Result<Trace, ReportError> {
    let text = fs::read_to_string(path).map_err(|source| ReportError::Read {
        path: path.to_path_buf(),
        source,
    })?;
    parse(&text).map_err(|why| ReportError::NotATrace {
        path: path.to_path_buf(),
        why,
    })
}

fn parse(text: &str) -> Result<Trace, String> {
    let file: File = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if file.format != FORMAT {
        let found = file.format;
        return Err(format!(
            "`{FORMAT_KEY}` is {found}: this program reads {FORMAT}"
        ));
    }
    let mut ranks: BTreeMap<usize, RankReader> = BTreeMap::new();
    for event in file.events {
        ranks.entry(event.pid).or_default().add(event)?;
    }
    let ranks = ranks.into_iter();
    Ok(Trace {
        steps: file.steps,
        run_id: file.run_id,
        layout: file.layout,
        notes: file.notes,
        ranks: ranks
            .map(|(rank, reader)| RankTrace {
                rank,
                ..reader.rank
            })
            .collect(),
    })
}

#[derive(Default)]
struct RankReader {
    rank: RankTrace,
    names: HashMap<String, usize>,
    /// The collectives whose end has not come yet.
    open: HashMap<u64, CallRecord>,
}

impl RankReader {
    fn add(&mut self, event: Event) -> Result<(), String> {
        let start = nanos(event.ts);
        let end = start + nanos(event.dur);
        match (event.ph.as_str(), event.cat.as_str()) {
            ("M", _) if event.name == "process_name" => {
                self.rank.host = field(&event, "host")?;
                self.rank.notes = field(&event, "notes")?;
            }
            ("X", "host") => {
                let numbers = event.args.into_iter();
                let numbers = numbers.map(|(name, number)| match number.as_u64() {
                    Some(number) => Ok((name, number)),
                    None => Err(format!("`{name}` of `{}` is not a number", event.name)),
                });
                self.rank.spans.push(SpanRecord {
                    numbers: numbers.collect::<Result<_, _>>()?,
                    name: event.name,
                    start,
                    end,
                });
            }
            ("X", "collective") => self.rank.calls.push(call(&event, start, end)?),
            ("b", "collective") => {
                self.open.insert(event.id, call(&event, start, start)?);
            }
            ("e", "collective") => {
                let call = self.open.remove(&event.id);
                let call = call.ok_or_else(|| format!("`{}` ends before it begins", event.name))?;
                self.rank.calls.push(CallRecord { end: start, ..call });
            }
            ("X", kind @ ("kernel" | "copy")) => {
                let is_copy = kind == "copy";
                let bytes = if is_copy { field(&event, "bytes")? } else { 0 };
                let stream = event.tid.checked_sub(FIRST_STREAM_ROW);
                let stream = stream.ok_or_else(|| format!("{} is no row of a GPU", event.tid))?;
                let next = self.rank.names.len();
                let name = *self.names.entry(event.name).or_insert_with_key(|name| {
                    self.rank.names.push(name.clone());
                    next
                });
                self.rank.gpu.push(GpuRecord {
                    name,
                    is_copy,
                    stream,
                    bytes,
                    start,
                    end,
                });
            }
            _ => {}
        }
        Ok(())
    }
}

fn call(event: &Event, start: u64, end: u64) -> Result<CallRecord, String> {
    Ok(CallRecord {
        group: field(event, "group")?,
        op: field(event, "op")?,
        seq: field(event, "seq")?,
        dtype: field(event, "dtype")?,
        shape: field(event, "shape")?,
        bytes: field(event, "bytes")?,
        place: field(event, "place")?,
        start,
        end,
    })
}

fn field<T: DeserializeOwned>(event: &Event, name: &str) -> Result<T, String> {
    let value = event.args.get(name).cloned().unwrap_or_default();
    T::deserialize(value).map_err(|error| format!("`{name}` of `{}`: {error}", event.name))
}

/// Nanoseconds of a time in microseconds.
fn nanos(micros: f64) -> u64 {
    (micros * 1000.0).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{CallPlace, is_chrome_trace, write_chrome};

    fn call(place: CallPlace, start: u64) -> CallRecord {
        CallRecord {
            group: "dp".into(),
            op: "all_reduce(sum)".into(),
            seq: 4,
            dtype: "F32".into(),
            shape: vec![2, 3],
            bytes: 24,
            start,
            end: start + 1_001,
            place,
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let rank = RankTrace {
            rank: 3,
            host: "n\"1\"".into(),
            spans: vec![SpanRecord {
                name: "forward".into(),
                numbers: vec![("chunk".into(), 1), ("micro_batch".into(), 2)],
                start: 1_234_567_890_123,
                end: 1_234_567_890_124,
            }],
            calls: vec![
                call(CallPlace::Host, 5),
                call(CallPlace::Gpu, 1_000_007),
                call(CallPlace::OtherThread, 1_000_008),
            ],
            names: vec!["nvjet\\x".into(), "copy on the GPU".into()],
            gpu: vec![
                GpuRecord {
                    name: 0,
                    stream: 7,
                    start: 10,
                    end: 19,
                    ..GpuRecord::default()
                },
                GpuRecord {
                    name: 1,
                    is_copy: true,
                    stream: 0,
                    bytes: 64,
                    start: 20,
                    end: 21,
                },
            ],
            notes: vec!["2 records were dropped".into()],
        };
        let trace = Trace {
            steps: [10, 12],
            run_id: "1f".into(),
            layout: "dp2".into(),
            notes: vec!["a note".into()],
            ranks: vec![
                RankTrace {
                    rank: 0,
                    ..RankTrace::default()
                },
                rank,
            ],
        };
        let text = write_chrome(&trace);
        assert!(is_chrome_trace(&text) && !is_chrome_trace("{\"traceEvents\":[]}"));
        assert_eq!(parse(&text).unwrap(), trace);
        // As any reader of JSON sees it.
        let json: Value = serde_json::from_str(&text).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        let forward = events
            .iter()
            .find(|event| event["name"] == "forward")
            .unwrap();
        assert_eq!(
            (forward["ts"].as_f64(), &forward["pid"]),
            (Some(1_234_567_890.123), &3.into())
        );
    }

    #[test]
    fn other_files_are_refused_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.json");
        for (text, why) in [
            ("{\"traceEvents\":[]}", "megaburn_trace"),
            ("no json", "expected"),
            (
                "{\"megaburn_trace\":9,\"steps\":[1,2],\"run_id\":\"\",\"layout\":\"\",\
                \"notes\":[],\"traceEvents\":[]}",
                "this program reads 1",
            ),
        ] {
            fs::write(&path, text).unwrap();
            let error = read_chrome(&path).unwrap_err().to_string();
            assert!(
                error.contains("trace.json") && error.contains(why),
                "{error}"
            );
        }
    }
}
