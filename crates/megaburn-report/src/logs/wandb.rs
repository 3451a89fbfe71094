//! The offline folder of a run for Weights & Biases, which `wandb sync` uploads.
//!
//! `run-ID.wandb` is a log in LevelDB's format of messages `Record`. Each start writes the whole
//! file anew from the metrics of earlier starts, because a record cannot be taken back when steps
//! are trained again.
//!
//! Source: `wandb/proto/wandb_internal.proto` and `wandb/sdk/internal/datastore.py` of the client
//! (0.19), LevelDB's `doc/log_format.md`.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use chrono::DateTime;
use megaburn_checkpoint::write_atomic;

use super::{
    append_file::AppendFile,
    log::Log,
    options::{LogOptions, WandbOptions},
    protobuf::Message,
    values::{Values, now},
};
use crate::metrics::MetricsRecord;

/// The folder of offline runs in a run's folder.
pub const WANDB: &str = "wandb";

/// What the names of folders of offline runs start with.
const PREFIX: &str = "offline-run-";

/// The letters of a run's id that are its id here.
const ID_LEN: usize = 12;

/// The bytes of a block of the log.
const BLOCK: usize = 32768;
/// The bytes before the data of a part of a record: checksum, length, type.
const PART_HEADER: usize = 7;

/// Whether a folder name is the one of an offline run.
pub fn is_run_folder(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Whether a file name is the one of a run's log.
pub fn is_run_file(name: &str) -> bool {
    name.starts_with("run-") && name.ends_with(".wandb")
}

/// Writes the log of a run.
#[derive(Debug)]
pub(super) struct Wandb {
    file: AppendFile,
    log: LogWriter,
    /// When the run began, in seconds since 1970.
    began: f64,
    row: Option<Row>,
}

/// The numbers of a step, which are written once the next step is known: evaluations add to them.
#[derive(Debug)]
struct Row {
    step: u64,
    time: f64,
    numbers: BTreeMap<String, f64>,
}

impl Wandb {
    /// Writes the log anew, with `history`.
    pub(super) fn open(
        options: &LogOptions,
        wandb: &WandbOptions,
        history: &[MetricsRecord],
    ) -> io::Result<Self> {
        let id: String = options.run_id.chars().take(ID_LEN).collect();
        let first = history.first().map(Values::of);
        let began = first.map_or_else(now, |first| first.time());
        let folder = folder_of(&options.dir.join(WANDB), &id, began)?;
        let path = folder.join(format!("run-{id}.wandb"));
        let mut log = LogWriter::default();
        log.write_header();
        log.write(21, &header());
        log.write(17, &run(options, wandb, &id, began));
        let mut row = None;
        for record in history {
            add(&mut row, &mut log, record, began);
        }
        write_atomic(&path, &log.take())?;
        let file = File::options().append(true).open(&path)?;
        Ok(Self {
            file: AppendFile::new(path, file),
            log,
            began,
            row,
        })
    }
}

impl Log for Wandb {
    fn write(&mut self, record: &MetricsRecord) {
        add(&mut self.row, &mut self.log, record, self.began);
        self.file.append(&self.log.take());
    }

    fn end(&mut self, exit_code: u8) {
        if let Some(row) = self.row.take() {
            row.write(&mut self.log, self.began);
        }
        let runtime = (now() - self.began).max(0.0) as u64;
        let exit = Message::default().varint(1, exit_code.into());
        self.log.write(18, &exit.varint(2, runtime));
        self.file.append(&self.log.take());
    }

    fn file(&mut self) -> Option<&mut AppendFile> {
        Some(&mut self.file)
    }
}

/// Adds a record to the row of its step. The row of an earlier step is written.
fn add(row: &mut Option<Row>, log: &mut LogWriter, record: &MetricsRecord, began: f64) {
    let values = Values::of(record);
    if row.as_ref().is_some_and(|row| row.step != values.step)
        && let Some(row) = row.take()
    {
        row.write(log, began);
    }
    let row = row.get_or_insert_with(|| Row {
        step: values.step,
        time: values.time(),
        numbers: BTreeMap::new(),
    });
    row.numbers.extend(values.tagged());
}

impl Row {
    /// Writes the row as history, and as the summary so far.
    fn write(self, log: &mut LogWriter, began: f64) {
        let about = [
            ("_step", self.step as f64),
            ("_timestamp", self.time),
            ("_runtime", (self.time - began).max(0.0)),
        ];
        let numbers = self
            .numbers
            .iter()
            .map(|(name, value)| (name.as_str(), *value));
        let items: Vec<Message> = about
            .into_iter()
            .chain(numbers)
            .map(|(name, value)| Message::default().string(2, name).string(16, &json(value)))
            .collect();
        let all = |message: Message| {
            let add = |message: Message, item| message.message(1, item);
            items.iter().fold(message, add)
        };
        log.write(3, &all(Message::default()));
        let step = Message::default().varint(1, self.step);
        log.write(2, &all(Message::default()).message(2, &step));
    }
}

/// A number as the client's JSON, which has names for those that are not finite.
fn json(value: f64) -> String {
    match value {
        value if value.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        value => value.to_string(),
    }
}

/// The folder of the run in `dir`: that of an earlier start, or a new one.
fn folder_of(dir: &Path, id: &str, began: f64) -> io::Result<PathBuf> {
    fs::create_dir_all(dir)?;
    let of_run = format!("-{id}");
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let name = name.to_string_lossy();
        if is_run_folder(&name) && name.ends_with(&of_run) {
            return Ok(dir.join(&*name));
        }
    }
    let time = DateTime::from_timestamp(began as i64, 0).unwrap_or_default();
    let folder = dir.join(format!("{PREFIX}{}{of_run}", time.format("%Y%m%d_%H%M%S")));
    fs::create_dir(&folder)?;
    Ok(folder)
}

/// `HeaderRecord`: who wrote the log, and the oldest client that can read it.
fn header() -> Message {
    let version = Message::default()
        .string(1, concat!("megaburn-", env!("CARGO_PKG_VERSION")))
        .string(2, "0.12.0");
    Message::default().message(1, &version)
}

/// `RunRecord`: the run and its configuration.
fn run(options: &LogOptions, wandb: &WandbOptions, id: &str, began: f64) -> Message {
    let item = |(key, value): (&String, &serde_json::Value)| {
        Message::default()
            .string(1, key)
            .string(16, &value.to_string())
    };
    let config = wandb.config.iter().map(item);
    let add = |config: Message, item| config.message(1, &item);
    let config = config.fold(Message::default(), add);
    let nanos = (began.fract() * 1e9) as u64;
    let time = Message::default().varint(1, began as u64).varint(2, nanos);
    let host = nix::unistd::gethostname().unwrap_or_default();
    Message::default()
        .string(1, id)
        .string(3, &wandb.project)
        .message(4, &config)
        .string(8, &options.run_name)
        .string(13, &host.to_string_lossy())
        .message(17, &time)
}

/// Frames records as LevelDB's log does, except that the first block begins with a header and that
/// checksums are plain CRC-32.
#[derive(Debug, Default)]
struct LogWriter {
    /// Bytes that are not taken yet.
    bytes: Vec<u8>,
    /// All bytes so far.
    len: usize,
    num_records: u64,
}

impl LogWriter {
    /// The header of the file: a name, a magic number, a version.
    fn write_header(&mut self) {
        self.push(b":W&B\xe1\xbe\x00");
    }

    /// Writes a `Record` of which `what` is the field of this number.
    fn write(&mut self, field: u32, what: &Message) {
        self.num_records += 1;
        let record = Message::default()
            .varint(1, self.num_records)
            .message(field, what);
        let mut data = record.bytes();
        let mut is_first = true;
        loop {
            let mut room = BLOCK - self.len % BLOCK;
            if room < PART_HEADER {
                self.push(&[0; PART_HEADER][..room]);
                room = BLOCK;
            }
            let (part, rest) = data.split_at(data.len().min(room - PART_HEADER));
            // Full, first, middle and last part.
            let kind = match (is_first, rest.is_empty()) {
                (true, true) => 1,
                (true, false) => 2,
                (false, false) => 3,
                (false, true) => 4,
            };
            let mut crc = crc32fast::Hasher::new();
            crc.update(&[kind]);
            crc.update(part);
            self.push(&crc.finalize().to_le_bytes());
            self.push(&(part.len() as u16).to_le_bytes());
            self.push(&[kind]);
            self.push(part);
            if rest.is_empty() {
                return;
            }
            (data, is_first) = (rest, false);
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        self.len += bytes.len();
        self.bytes.extend(bytes);
    }

    /// The bytes since the last call.
    fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}
