use std::{fs, path::Path};

use super::MetricsRecord;
use crate::TrainError;

/// Reads `metrics.jsonl`. A last line without its line feed was torn by the end of the process and
/// is left out.
///
/// # Errors
/// The file cannot be read, or a whole line is no line of metrics.
pub fn read_metrics(path: impl AsRef<Path>) -> Result<Vec<MetricsRecord>, TrainError> {
    let path = path.as_ref();
    let bytes = fs::read(path).map_err(|source| TrainError::Read { path: path.into(), source })?;
    bytes
        .split_inclusive(|&byte| byte == b'\n')
        .filter(|line| line.ends_with(b"\n"))
        .enumerate()
        .map(|(index, line)| {
            MetricsRecord::parse(line).map_err(|source| TrainError::MetricsLine {
                path: path.into(),
                line: index + 1,
                source,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Exit,
        metrics::{MetricsWriter, example_eval, example_step},
    };

    #[test]
    fn what_was_written_is_read_and_a_torn_last_line_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::open(&path, 0).unwrap();
        writer.write(example_step(1, 5.5)).unwrap();
        writer.write(example_eval(1, 5.25)).unwrap();
        writer.write(example_step(2, 5.0)).unwrap();
        let whole = read_metrics(&path).unwrap();
        assert_eq!(whole.iter().map(MetricsRecord::step).collect::<Vec<_>>(), [1, 1, 2]);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert_eq!(read_metrics(&path).unwrap(), whole[..2]);
    }

    #[test]
    fn a_whole_line_that_is_no_metrics_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        fs::write(&path, "{\"step\":1,\"eval_loss\":1.0}\n{\"step\":2}\n").unwrap();
        let error = read_metrics(&path).unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains("m.jsonl`, line 2 is no line of metrics: missing field"),
            "{message}"
        );
        assert_eq!(error.exit(), Exit::BadInput);
    }

    #[test]
    fn an_absent_file_is_an_error_and_an_empty_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        assert!(read_metrics(&path).unwrap_err().to_string().starts_with("cannot read `"));
        fs::write(&path, "").unwrap();
        assert_eq!(read_metrics(&path).unwrap(), []);
    }
}
