use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, BufWriter, Write},
    path::{Path, PathBuf},
};

use super::MetricsRecord;
use crate::TrainError;

/// Appends to `metrics.jsonl`, one line a record. Only one process writes a run's metrics.
///
/// # Guarantee
/// A line is handed to the operating system before [`write`](Self::write) returns: it outlives a
/// panic and `kill -9`, not a power loss. The process may die inside a line; the next `open` drops
/// what it left.
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    file: File,
}

impl MetricsWriter {
    /// Opens the metrics of a run that goes on after `step`, the step of its checkpoint (0: the
    /// run starts afresh). Whatever stands in the file is first cut back to the whole, readable
    /// lines up to that step; they are written aside and renamed into place, so dying in between
    /// loses none of them.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn open(path: impl Into<PathBuf>, step: u64) -> Result<Self, TrainError> {
        let path = path.into();
        match cut_back(&path, step) {
            Ok(file) => Ok(Self { path, file }),
            Err(source) => Err(TrainError::Write { path, source }),
        }
    }

    /// Appends a line.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, record: impl Into<MetricsRecord>) -> Result<(), TrainError> {
        let mut line = serde_json::to_vec(&record.into()).expect("numbers are always JSON");
        line.push(b'\n');
        let Self { path, file } = self;
        // One call for the whole line: what dies between two writes must not tear it.
        file.write_all(&line).map_err(|source| TrainError::Write { path: path.clone(), source })
    }
}

fn cut_back(path: &Path, step: u64) -> io::Result<File> {
    let aside = path.with_added_extension("tmp");
    let mut kept = BufWriter::new(File::create(&aside)?);
    match File::open(path) {
        Ok(old) => copy_through(BufReader::new(old), &mut kept, step)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    kept.into_inner()?.sync_all()?;
    fs::rename(&aside, path)?;
    OpenOptions::new().append(true).open(path)
}

fn copy_through(mut old: impl BufRead, kept: &mut impl Write, step: u64) -> io::Result<()> {
    let mut line = Vec::new();
    while old.read_until(b'\n', &mut line)? > 0 {
        let record = MetricsRecord::parse(&line);
        if line.ends_with(b"\n") && record.is_ok_and(|record| record.step() <= step) {
            kept.write_all(&line)?;
        }
        line.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::{
        Exit,
        metrics::{example_eval, example_step, read_metrics},
    };

    fn steps(path: &Path) -> Vec<u64> {
        read_metrics(path).unwrap().iter().map(MetricsRecord::step).collect()
    }

    fn run_to(path: &Path, from: u64, to: u64) {
        let mut writer = MetricsWriter::open(path, from).unwrap();
        for step in from + 1..=to {
            writer.write(example_step(step, 1.0 / step as f64)).unwrap();
            if step % 2 == 0 {
                writer.write(example_eval(step, 0.5)).unwrap();
            }
        }
    }

    #[rstest]
    #[case(0, &[])]
    #[case(1, &[1])]
    #[case(2, &[1, 2, 2])]
    #[case(3, &[1, 2, 2, 3])]
    #[case(9, &[1, 2, 2, 3, 4, 4])]
    fn resuming_keeps_the_lines_up_to_the_checkpoint(#[case] step: u64, #[case] kept: &[u64]) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        run_to(&path, 0, 4);
        drop(MetricsWriter::open(&path, step).unwrap());
        assert_eq!(steps(&path), kept);
        let names: Vec<_> = fs::read_dir(&dir).unwrap().map(|f| f.unwrap().file_name()).collect();
        assert_eq!(names, ["metrics.jsonl"]);
    }

    #[test]
    fn a_resumed_file_equals_that_of_a_run_that_never_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let (whole, resumed) = (dir.path().join("whole"), dir.path().join("resumed"));
        run_to(&whole, 0, 9);
        run_to(&resumed, 0, 7);
        run_to(&resumed, 5, 9);
        assert_eq!(fs::read(whole).unwrap(), fs::read(resumed).unwrap());
    }

    #[test]
    fn a_file_torn_at_any_byte_is_cut_to_its_whole_lines_and_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        run_to(&path, 0, 3);
        let bytes = fs::read(&path).unwrap();
        for length in 0..bytes.len() {
            fs::write(&path, &bytes[..length]).unwrap();
            let whole = bytes[..length].iter().filter(|&&byte| byte == b'\n').count();
            MetricsWriter::open(&path, 9).unwrap().write(example_step(10, 1.0)).unwrap();
            let steps = steps(&path);
            assert_eq!((steps.len(), steps[whole]), (whole + 1, 10), "cut at {length}");
        }
    }

    #[test]
    fn lines_that_are_no_metrics_are_dropped_and_those_around_them_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let eval = "{\"step\":1,\"eval_loss\":1.0}\n";
        fs::write(&path, [eval.as_bytes(), b"\0\0\0\n\xff\n\n{}\n", eval.as_bytes()].concat())
            .unwrap();
        drop(MetricsWriter::open(&path, 1).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), eval.repeat(2));
    }

    #[test]
    fn a_line_is_in_the_file_as_soon_as_it_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::open(&path, 0).unwrap();
        for step in 1..=3 {
            writer.write(example_step(step, f64::NAN)).unwrap();
            assert_eq!(steps(&path).len() as u64, step);
        }
    }

    #[test]
    fn a_folder_that_does_not_exist_is_an_error_with_the_path() {
        let error = MetricsWriter::open("/no/such/folder/metrics.jsonl", 0).unwrap_err();
        assert!(error.to_string().starts_with("cannot write `/no/such/folder/metrics.jsonl`: "));
        assert_eq!(error.exit(), Exit::Failed);
    }
}
