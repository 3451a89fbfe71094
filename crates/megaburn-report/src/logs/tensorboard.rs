//! Event files of TensorBoard.
//!
//! A file is a sequence of TFRecords: the length and its checksum, the data and its checksum. Each
//! holds an `Event`. A start of a run writes a new file, whose first events let TensorBoard drop
//! what earlier files have of steps that are trained again.
//!
//! Source: `tensorflow/core/lib/io/record_writer.cc`, `tensorboard/compat/proto/event.proto`,
//! PyTorch's `torch/utils/tensorboard/writer.py`.

use std::{
    fs::{self, File},
    io::{self, BufWriter, IntoInnerError, Write},
    path::{Path, PathBuf},
};

use super::{
    append_file::AppendFile,
    log::Log,
    options::LogOptions,
    protobuf::Message,
    values::{Values, now},
};
use crate::metrics::MetricsRecord;

/// The folder of event files in a run's folder.
pub const TENSORBOARD: &str = "tensorboard";

/// What the names of event files start with.
const PREFIX: &str = "events.out.tfevents.";
/// What the names of those end with that a run wrote.
const SUFFIX: &str = ".megaburn";

/// Whether a file name is the one of an event file that a run wrote. Other programs write such files
/// too.
pub fn is_event_file(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(SUFFIX)
}

/// Writes an event file.
#[derive(Debug)]
pub(super) struct TensorBoard {
    file: AppendFile,
}

impl TensorBoard {
    /// Begins a file in the run's folder. If it is the first one, it begins with `history`.
    pub(super) fn open(options: &LogOptions, history: &[MetricsRecord]) -> io::Result<Self> {
        let dir = options.dir.join(TENSORBOARD);
        fs::create_dir_all(&dir)?;
        let mut is_first = true;
        for entry in fs::read_dir(&dir)? {
            is_first &= !is_event_file(&entry?.file_name().to_string_lossy());
        }
        let (path, file) = create(&dir)?;
        let mut out = BufWriter::new(file);
        let now = now();
        let purge_step = options.from_step + 1;
        let mut begin = Vec::new();
        for what in [
            event(now, purge_step).string(3, "brain.Event:2"),
            // `SessionLog` with the status `START`.
            event(now, purge_step).message(7, &Message::default().varint(1, 1)),
        ] {
            push_record(&mut begin, what.bytes());
        }
        for record in history.iter().filter(|_| is_first) {
            push_record(&mut begin, summary(record).bytes());
            out.write_all(&begin)?;
            begin.clear();
        }
        out.write_all(&begin)?;
        let file = out.into_inner().map_err(IntoInnerError::into_error)?;
        Ok(Self {
            file: AppendFile::new(path, file),
        })
    }
}

impl Log for TensorBoard {
    fn write(&mut self, record: &MetricsRecord) {
        let mut bytes = Vec::new();
        push_record(&mut bytes, summary(record).bytes());
        self.file.append(&bytes);
    }

    fn end(&mut self, _: u8) {}

    fn file(&mut self) -> Option<&mut AppendFile> {
        Some(&mut self.file)
    }
}

/// Creates a file whose name sorts after those of earlier starts. Nothing is overwritten.
fn create(dir: &Path) -> io::Result<(PathBuf, File)> {
    let seconds = now() as u64;
    let host = nix::unistd::gethostname().unwrap_or_default();
    let host = host.to_string_lossy().replace('/', "-");
    let pid = std::process::id();
    let mut number = 0;
    loop {
        let path = dir.join(format!(
            "{PREFIX}{seconds:010}.{host}.{pid}.{number}{SUFFIX}"
        ));
        match File::options().append(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            file => return file.map(|file| (path, file)),
        }
    }
}

fn event(wall_time: f64, step: u64) -> Message {
    Message::default().double(1, wall_time).varint(2, step)
}

/// The event of a step or an evaluation: all its numbers as `simple_value`.
fn summary(record: &MetricsRecord) -> Message {
    let values = Values::of(record);
    let mut summary = Message::default();
    for (tag, number) in values.tagged() {
        let value = Message::default().string(1, &tag).float(2, number as f32);
        summary = summary.message(1, &value);
    }
    event(values.time(), values.step).message(5, &summary)
}

/// Appends a TFRecord.
fn push_record(bytes: &mut Vec<u8>, data: &[u8]) {
    let len = (data.len() as u64).to_le_bytes();
    bytes.extend(len);
    bytes.extend(masked_crc(&len).to_le_bytes());
    bytes.extend(data);
    bytes.extend(masked_crc(data).to_le_bytes());
}

/// The checksum of TFRecords: a CRC-32C, rotated and offset, because the CRC of data that contains
/// CRCs is a weak one.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
        .rotate_right(15)
        .wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first record of every file that TensorFlow and PyTorch write: `Event` with
    /// `brain.Event:2`, here at time 0.
    #[test]
    fn a_record_is_framed_as_a_tfrecord() {
        let mut bytes = Vec::new();
        push_record(&mut bytes, b"abc");
        assert_eq!(bytes.len(), 8 + 4 + 3 + 4);
        assert_eq!(bytes[..8], 3u64.to_le_bytes());
        // CRC-32C of "abc" is 0x364b3fb7.
        let masked = 0x364b_3fb7u32.rotate_right(15).wrapping_add(0xa282_ead8);
        assert_eq!(bytes[15..], masked.to_le_bytes());
    }
}
