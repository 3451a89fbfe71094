//! A profile in Chrome's trace format, which Perfetto (<https://ui.perfetto.dev>) and
//! `chrome://tracing` open: a process for each rank, with a row for its host thread, one for each
//! stream of its GPU, and its collectives.

use std::{
    collections::BTreeSet,
    fmt::{self, Write},
};

use serde::Serialize;
use serde_json::{Value, json};

use super::{
    kernels::KernelClass,
    trace::{CallPlace, CallRecord, GpuRecord, RankTrace, SpanRecord, Trace},
};

/// The version of the file's format, and the key that holds it.
pub(super) const FORMAT: u64 = 1;
pub(super) const FORMAT_KEY: &str = "megaburn_trace";
/// The number of the row of the host thread.
const HOST_ROW: u32 = 1;
/// The number of the row of the GPU's stream 0; others follow.
pub(super) const FIRST_STREAM_ROW: u32 = 100;

/// What a file of Chrome's format says of the profile, in addition to its events.
#[derive(Serialize)]
struct Head<'a> {
    #[serde(rename = "megaburn_trace")]
    format: u64,
    steps: [u64; 2],
    run_id: &'a str,
    layout: &'a str,
    notes: &'a [String],
    #[serde(rename = "displayTimeUnit")]
    unit: &'static str,
}

/// The profile as the text of a file in Chrome's trace format, with a line for each event.
pub fn write_chrome(trace: &Trace) -> String {
    let head = Head {
        format: FORMAT,
        steps: trace.steps,
        run_id: &trace.run_id,
        layout: &trace.layout,
        notes: &trace.notes,
        unit: "ms",
    };
    let head = json!(head).to_string();
    let mut out = Out {
        text: format!("{},\"traceEvents\":[", &head[..head.len() - 1]),
        is_first: true,
        next_id: 0,
    };
    for rank in &trace.ranks {
        out.rank(rank);
    }
    out.text.push_str("\n]}\n");
    out.text
}

/// Whether `text` is the beginning of a file that [`write_chrome`] wrote.
pub fn is_chrome_trace(text: &str) -> bool {
    text.starts_with(&format!("{{\"{FORMAT_KEY}\":"))
}

struct Out {
    text: String,
    is_first: bool,
    next_id: u64,
}

/// A time in microseconds, with its nanoseconds.
struct Micros(u64);

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

impl Out {
    /// Adds an event, given as the inside of a JSON object.
    fn event(&mut self, fields: fmt::Arguments<'_>) {
        let separator = if self.is_first { "\n" } else { ",\n" };
        self.is_first = false;
        // Writing to a string does not fail.
        let _ = write!(self.text, "{separator}{{{fields}}}");
    }

    fn rank(&mut self, rank: &RankTrace) {
        let pid = rank.rank;
        let name = match rank.host.is_empty() {
            true => format!("rank {pid}"),
            false => format!("rank {pid} on {}", rank.host),
        };
        let args = json!({ "name": name, "host": rank.host, "notes": rank.notes });
        self.event(format_args!(
            r#""ph":"M","name":"process_name","pid":{pid},"tid":0,"args":{args}"#
        ));
        self.event(format_args!(
            r#""ph":"M","name":"process_sort_index","pid":{pid},"tid":0,"args":{{"sort_index":{pid}}}"#
        ));
        self.row(pid, HOST_ROW, "host thread");
        let streams: BTreeSet<u32> = rank.gpu.iter().map(|work| work.stream).collect();
        for stream in streams {
            self.row(
                pid,
                FIRST_STREAM_ROW + stream,
                &format!("GPU, stream {stream}"),
            );
        }
        rank.spans.iter().for_each(|span| self.span(pid, span));
        rank.calls.iter().for_each(|call| self.call(pid, call));
        let names: Vec<[String; 2]> = rank.names.iter().map(|name| quoted(name)).collect();
        for work in &rank.gpu {
            self.work(pid, &names[work.name], work);
        }
    }

    fn row(&mut self, pid: usize, tid: u32, name: &str) {
        let args = json!({ "name": name });
        self.event(format_args!(
            r#""ph":"M","name":"thread_name","pid":{pid},"tid":{tid},"args":{args}"#
        ));
        self.event(format_args!(
            r#""ph":"M","name":"thread_sort_index","pid":{pid},"tid":{tid},"args":{{"sort_index":{tid}}}"#
        ));
    }

    fn span(&mut self, pid: usize, span: &SpanRecord) {
        let name = Value::from(span.name.as_str());
        let (ts, dur) = times(span.start, span.end);
        let numbers = span.numbers.iter();
        let numbers = numbers.map(|(name, number)| (name.clone(), Value::from(*number)));
        let args = Value::Object(numbers.collect());
        self.event(format_args!(
            r#""ph":"X","cat":"host","name":{name},"pid":{pid},"tid":{HOST_ROW},"ts":{ts},"dur":{dur},"args":{args}"#
        ));
    }

    fn call(&mut self, pid: usize, call: &CallRecord) {
        let name = Value::from(format!("{} {}", call.op, call.group));
        let (ts, dur) = times(call.start, call.end);
        let args = json!({
            "group": call.group, "op": call.op, "seq": call.seq, "dtype": call.dtype,
            "shape": call.shape, "bytes": call.bytes, "place": call.place,
        });
        if call.place == CallPlace::Host {
            return self.event(format_args!(
                r#""ph":"X","cat":"collective","name":{name},"pid":{pid},"tid":{HOST_ROW},"ts":{ts},"dur":{dur},"args":{args}"#
            ));
        }
        // Those that the thread does not wait for overlap its parts and each other.
        let id = self.next_id;
        self.next_id += 1;
        let end = Micros(call.end.max(call.start));
        self.event(format_args!(
            r#""ph":"b","cat":"collective","name":{name},"id":{id},"pid":{pid},"tid":{HOST_ROW},"ts":{ts},"args":{args}"#
        ));
        self.event(format_args!(
            r#""ph":"e","cat":"collective","name":{name},"id":{id},"pid":{pid},"tid":{HOST_ROW},"ts":{end}"#
        ));
    }

    fn work(&mut self, pid: usize, [name, class]: &[String; 2], work: &GpuRecord) {
        let (ts, dur) = times(work.start, work.end);
        let tid = FIRST_STREAM_ROW + work.stream;
        match work.is_copy {
            true => self.event(format_args!(
                r#""ph":"X","cat":"copy","name":{name},"pid":{pid},"tid":{tid},"ts":{ts},"dur":{dur},"args":{{"bytes":{}}}"#,
                work.bytes
            )),
            false => self.event(format_args!(
                r#""ph":"X","cat":"kernel","name":{name},"pid":{pid},"tid":{tid},"ts":{ts},"dur":{dur},"args":{{"class":{class}}}"#
            )),
        }
    }
}

/// A kernel's name and its class, as JSON.
fn quoted(name: &str) -> [String; 2] {
    [name, KernelClass::of(name).name()].map(|text| Value::from(text).to_string())
}

fn times(start: u64, end: u64) -> (Micros, Micros) {
    (Micros(start), Micros(end.saturating_sub(start)))
}
