use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, BufWriter, Seek, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use megaburn_checkpoint::{TMP, sibling_path, write_atomic};
use serde::Serialize;

use super::{EvalMetrics, MetricsRecord, line::Line};
use crate::error::ReportError;

/// The file next to `metrics.jsonl` with those of its lines that are not JSON objects.
pub const OTHER_LINES: &str = "metrics.other-lines.txt";

/// Appends to `metrics.jsonl`, one line per record. Only one process writes a run's metrics.
///
/// # Guarantee
/// A line is passed to the operating system before [`write`](Self::write) returns, so it survives a
/// panic and `kill -9`. After [`sync`](Self::sync) it survives a power loss. A line that cannot be
/// written stays in memory and is written before the next one. If the process dies inside a line,
/// the next `open` removes the partial line.
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    file: File,
    /// Bytes that could not be written yet.
    waiting: Vec<u8>,
    found: FoundLines,
}

/// A step that has evaluations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvaluatedStep {
    /// The step.
    pub step: u64,
    /// The names of the data sets, as in [`EvalMetrics::data`](super::EvalMetrics::data).
    pub data: Vec<Option<String>>,
}

impl EvaluatedStep {
    /// Whether it has this evaluation.
    pub fn has(&self, step: u64, data: Option<&str>) -> bool {
        self.step == step && self.data.iter().any(|known| known.as_deref() == data)
    }

    fn add(found: &mut Option<Self>, eval: &EvalMetrics) {
        let before = found.take().filter(|found| found.step >= eval.step);
        let mut last = before.unwrap_or_default();
        if last.step <= eval.step {
            last.step = eval.step;
            last.data.push(eval.data.clone());
        }
        *found = Some(last);
    }
}

/// What a file contained when it was opened.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FoundLines {
    /// Number of starts of this run.
    pub starts: u64,
    /// The last step that has evaluations.
    pub evaluated: Option<EvaluatedStep>,
    /// All evaluations, in the order of the file.
    pub evals: Vec<EvalMetrics>,
    /// Number of lines that are not JSON objects. They were moved to `metrics.other-lines.txt` in
    /// the same folder.
    pub other_lines: usize,
}

impl MetricsWriter {
    /// Opens the metrics of the run `run_id`, which continues after `step`, the step of its
    /// checkpoint (0: the run starts from scratch). Steps, evaluations and checkpoints after that step are
    /// removed first, and so are the starts of other runs. JSON objects of other kinds stay. The
    /// remaining lines are written to a temporary file that replaces the old one, so a crash loses
    /// none of them.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn open(path: impl Into<PathBuf>, step: u64, run_id: &str) -> Result<Self, ReportError> {
        let path = path.into();
        match cut_back(&path, step, run_id) {
            Ok((file, found)) => Ok(Self {
                path,
                file,
                waiting: Vec::new(),
                found,
            }),
            Err(source) => Err(ReportError::Write { path, source }),
        }
    }

    /// What the file contained when it was opened.
    pub fn found(&self) -> FoundLines {
        self.found.clone()
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a step or an evaluation.
    ///
    /// # Errors
    /// The file cannot be written now; the line is kept for the next call.
    pub fn write(&mut self, record: impl Into<MetricsRecord>) -> Result<(), ReportError> {
        self.write_line(&record.into())
    }

    /// Appends a line of any kind, as one JSON object. Readers skip unknown kinds, so it must not
    /// have a `step` together with a `loss` or an `eval_loss`.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_line(&mut self, line: &impl Serialize) -> Result<(), ReportError> {
        serde_json::to_writer(&mut self.waiting, line).expect(
            "numbers and strings are always \
            serializable",
        );
        self.waiting.push(b'\n');
        self.flush()
    }

    /// Writes the lines that are waiting.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn flush(&mut self) -> Result<(), ReportError> {
        let result = self.reopen_if_moved().and_then(|()| self.write_waiting());
        result.map_err(|source| ReportError::Write {
            path: self.path.clone(),
            source,
        })
    }

    /// Makes all lines so far durable against a power loss.
    ///
    /// # Errors
    /// The file cannot be written or synced.
    pub fn sync(&mut self) -> Result<(), ReportError> {
        self.flush()?;
        let synced = self.file.sync_data();
        synced.map_err(|source| ReportError::Write {
            path: self.path.clone(),
            source,
        })
    }

    /// Number of lines that are waiting.
    pub fn num_waiting(&self) -> usize {
        self.waiting.iter().filter(|&&byte| byte == b'\n').count()
    }

    /// Usually writes a whole line in one call, so that dying between two writes cannot cut it off.
    fn write_waiting(&mut self) -> io::Result<()> {
        while !self.waiting.is_empty() {
            match self.file.write(&self.waiting) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.waiting.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Recreates a file that was removed, with all its lines. If another file is at the path,
    /// continues in that one.
    fn reopen_if_moved(&mut self) -> io::Result<()> {
        let held = self.file.metadata()?;
        let path = self.path.display();
        match fs::metadata(&self.path) {
            Ok(found) if (found.dev(), found.ino()) == (held.dev(), held.ino()) => return Ok(()),
            Ok(_) => tracing::warn!("`{path}` was replaced; the run continues in the new file"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.file.rewind()?;
                let mut lines = Vec::new();
                io::copy(&mut self.file, &mut lines)?;
                write_atomic(&self.path, &lines)?;
                tracing::warn!("`{path}` was removed; it was rewritten with all its lines");
            }
            Err(error) => return Err(error),
        }
        self.file = append(&self.path)?;
        Ok(())
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).append(true).open(path)
}

fn cut_back(path: &Path, step: u64, run_id: &str) -> io::Result<(File, FoundLines)> {
    // Rewrite the target of a link, not the link.
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let aside = sibling_path(path, TMP);
    let mut kept = BufWriter::new(File::create(&aside)?);
    let mut found = FoundLines::default();
    match File::open(path) {
        Ok(old) => {
            let mut others = Vec::new();
            found = copy_through(BufReader::new(old), &mut kept, &mut others, step, run_id)?;
            if !others.is_empty() {
                let mut sibling_path = append_or_make(&path.with_file_name(OTHER_LINES))?;
                sibling_path.write_all(&others)?;
                sibling_path.sync_all()?;
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    kept.into_inner()?.sync_all()?;
    fs::rename(&aside, path)?;
    Ok((append(path)?, found))
}

fn append_or_make(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

fn copy_through(
    mut old: impl BufRead,
    kept: &mut impl Write,
    others: &mut Vec<u8>,
    step: u64,
    run_id: &str,
) -> io::Result<FoundLines> {
    let mut found = FoundLines::default();
    let mut line = Vec::new();
    while old.read_until(b'\n', &mut line)? > 0 {
        let parsed = Line::parse(&line);
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        let is_kept = match parsed {
            Line::Record(record) => {
                let is_kept = record.step() <= step;
                if let MetricsRecord::Eval(eval) = &*record
                    && is_kept
                {
                    EvaluatedStep::add(&mut found.evaluated, eval);
                    found.evals.push(eval.clone());
                }
                is_kept
            }
            Line::Start { run_id: other } => {
                found.starts += u64::from(other == run_id);
                other == run_id
            }
            Line::OfStep { step: saved } => saved <= step,
            Line::Other => true,
            Line::Torn => false,
            Line::Foreign => {
                others.extend(&line);
                found.other_lines += 1;
                false
            }
        };
        if is_kept {
            kept.write_all(&line)?;
        }
        line.clear();
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
