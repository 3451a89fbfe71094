use std::{fs, path::Path};

use super::{MetricsRecord, line::Line};
use crate::error::ReportError;

/// Reads the steps and evaluations of `metrics.jsonl`. Lines of other kinds and lines that are not
/// JSON are skipped, because others may have written to the file.
///
/// # Errors
/// The file cannot be read.
pub fn read_metrics(path: impl AsRef<Path>) -> Result<Vec<MetricsRecord>, ReportError> {
    let path = path.as_ref();
    let bytes = fs::read(path).map_err(|source| ReportError::Read {
        path: path.into(),
        source,
    })?;
    let record = |line: &[u8]| match Line::parse(line) {
        Line::Record(record) => Some(*record),
        Line::Start { .. } | Line::OfStep { .. } | Line::Other | Line::Torn | Line::Foreign => None,
    };
    Ok(bytes
        .split_inclusive(|&byte| byte == b'\n')
        .filter_map(record)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{MetricsWriter, example_eval, example_step};

    #[test]
    fn what_was_written_is_read_and_a_torn_last_line_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::open(&path, 0, "1f").unwrap();
        writer.write(example_step(1, 5.5)).unwrap();
        writer.write(example_eval(1, 5.25)).unwrap();
        writer.write(example_step(2, 5.0)).unwrap();
        let whole = read_metrics(&path).unwrap();
        assert_eq!(
            whole.iter().map(MetricsRecord::step).collect::<Vec<_>>(),
            [1, 1, 2]
        );
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert_eq!(read_metrics(&path).unwrap(), whole[..2]);
    }

    #[test]
    fn lines_of_other_kinds_are_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        let lines = "{\"start\":1,\"run_id\":\"1f\"}\n{\"step\":1,\"eval_loss\":1.0}\nnotes\n{\"step\":2}\n";
        fs::write(&path, lines).unwrap();
        assert_eq!(read_metrics(&path).unwrap(), [example_eval(1, 1.0).into()]);
    }

    #[test]
    fn an_absent_file_is_an_error_and_an_empty_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        assert!(
            read_metrics(&path)
                .unwrap_err()
                .to_string()
                .starts_with("cannot read `")
        );
        fs::write(&path, "").unwrap();
        assert_eq!(read_metrics(&path).unwrap(), []);
    }
}
