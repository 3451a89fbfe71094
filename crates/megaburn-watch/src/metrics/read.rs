use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::Path,
};

use serde::Serialize;

use super::{
    events::Event,
    lines::{Layers, Lines},
    mark::{Mark, Sums, file_id},
    thin::{Series, thin},
};

/// The most bytes that one answer reads; the page asks for the next ones.
pub(super) const PART: u64 = 16 << 20;
/// The number of points of a measurement to which a whole file is thinned out.
const POINTS: u64 = 4000;
/// A part of a file is not thinned out below this number.
const FEWEST: u64 = 400;

/// What a part of `metrics.jsonl` has.
#[derive(Debug, Serialize)]
pub(crate) struct Metrics {
    /// The part is the start of the file, and what was read before is no longer there.
    reset: bool,
    from: u64,
    /// The byte from which the next part is read.
    to: u64,
    /// Bytes of the file.
    size: u64,
    mark: String,
    /// Measurements by name.
    series: BTreeMap<String, Series>,
    events: Vec<Event>,
    /// Events before these, which are left out because there are too many.
    events_left_out: usize,
    layers: Layers,
    /// There are too many points of these steps: nothing was read.
    too_many: bool,
}

impl Metrics {
    /// Says that there are too many points to read.
    pub(super) fn with_too_many(self) -> Self {
        Self {
            too_many: true,
            ..self
        }
    }
}

/// Size of a file, and a text that another file does not have.
pub(crate) fn size_and_file(path: &Path) -> io::Result<(u64, String)> {
    let found = fs::metadata(path)?;
    let (dev, ino) = file_id(&found);
    Ok((found.len(), format!("{dev:x}.{ino:x}")))
}

/// The whole seconds since a file was written to; `None` if there is none.
pub(crate) fn quiet_seconds(path: &Path) -> Option<u64> {
    let written = fs::metadata(path).and_then(|found| found.modified());
    // A host whose clock is behind that of the file server's has written just now.
    written
        .ok()
        .map(|written| written.elapsed().unwrap_or_default().as_secs())
}

/// The answer where there is no file, to a reader that stopped at `from`.
pub(crate) fn nothing(from: u64) -> Metrics {
    Metrics {
        reset: from > 0,
        from: 0,
        to: 0,
        size: 0,
        mark: String::new(),
        series: BTreeMap::new(),
        events: Vec::new(),
        events_left_out: 0,
        layers: Layers::default(),
        too_many: false,
    }
}

/// Reads what a file has from byte `from` on, where the reader stopped that got `mark`. If the file
/// was cut or replaced since, it is read from its start. A last line without a line feed is left
/// for the next call.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn read_from(path: &Path, from: u64, mark: &str) -> io::Result<Metrics> {
    let file = File::open(path)?;
    let mark = Mark::parse(mark);
    let continued = match mark.filter(|_| from > 0) {
        Some(mark) if mark.is_of(&file, from)? => Some(mark.sums),
        _ => None,
    };
    let begin = if continued.is_some() { from } else { 0 };
    let sums = continued.unwrap_or_default();
    let mut metrics = read_part(
        &file,
        Part {
            from: begin,
            most: PART,
            fewest: FEWEST,
        },
        sums,
    )?;
    metrics.reset = from > 0 && continued.is_none();
    Ok(metrics)
}

/// A part of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// Its first byte, at which a line begins.
    pub(super) from: u64,
    /// The most bytes that are read; one line may be longer.
    pub(super) most: u64,
    /// The number of points of a measurement that are not thinned out further.
    pub(super) fewest: u64,
}

/// Reads the whole lines of a part.
pub(super) fn read_part(file: &File, part: Part, sums: Sums) -> io::Result<Metrics> {
    let Part { from, most, fewest } = part;
    let size = file.metadata()?.len();
    let bytes = whole_lines(file, from, most)?;
    let mut lines = Lines::new(sums);
    for line in bytes.split(|byte| *byte == b'\n') {
        lines.add(line);
    }
    let to = from + bytes.len() as u64;
    let points = (POINTS * bytes.len() as u64 / size.max(1)).max(fewest);
    let thinned = |(name, points_of): (String, Vec<_>)| (name, thin(&points_of, points as usize));
    Ok(Metrics {
        from,
        to,
        size: size.max(to),
        mark: Mark::of(file, to, lines.sums)?.text(),
        series: lines.series.into_iter().map(thinned).collect(),
        events_left_out: lines.events.left_out(),
        events: lines.events.kept(),
        layers: lines.layers,
        ..nothing(0)
    })
}

/// The bytes from `from` up to a line feed.
fn whole_lines(file: &File, from: u64, most: u64) -> io::Result<Vec<u8>> {
    let mut most = most as usize;
    loop {
        let mut bytes = vec![0; most];
        let mut read = 0;
        while read < most {
            match file.read_at(&mut bytes[read..], from + read as u64) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        bytes.truncate(read);
        match bytes.iter().rposition(|byte| *byte == b'\n') {
            Some(last) => {
                bytes.truncate(last + 1);
                return Ok(bytes);
            }
            // A line that is longer than that, unless the file ends.
            None if read == most => most *= 2,
            None => return Ok(Vec::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::OpenOptions, io::Write};

    use serde_json::{Value, json};

    use super::*;

    /// A line of a step.
    fn step(step: u64) -> String {
        let line = json!({"step": step, "loss": 1.0 / step as f64, "tokens": 10, "tokens_per_second": 20.0});
        format!("{line}\n")
    }

    fn append(path: &Path, text: &str) {
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.unwrap().write_all(text.as_bytes()).unwrap();
    }

    fn value(metrics: &Metrics) -> Value {
        serde_json::to_value(metrics).unwrap()
    }

    #[test]
    fn only_what_is_new_is_read_and_a_torn_line_waits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        append(&path, &(step(1) + &step(2)));
        let first = read_from(&path, 0, "").unwrap();
        assert_eq!(value(&first)["series"]["loss"]["step"], json!([1, 2]));
        let line = step(3);
        append(&path, &line[..line.len() - 5]);
        let second = read_from(&path, first.to, &first.mark).unwrap();
        assert!(second.series.is_empty() && second.to == first.to && !second.reset);
        append(&path, &line[line.len() - 5..]);
        let third = read_from(&path, second.to, &second.mark).unwrap();
        let loss = &value(&third)["series"]["loss"];
        assert_eq!(
            (&loss["step"], &loss["tokens"]),
            (&json!([3]), &json!([30.0]))
        );
        assert_eq!(loss["seconds"], json!([1.5]));
        assert_eq!((third.to, third.reset), (third.size, false));
    }

    #[test]
    fn a_file_that_shrank_or_was_replaced_is_read_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let steps: String = (1..=9).map(step).collect();
        append(&path, &steps);
        let first = read_from(&path, 0, "").unwrap();
        // Cut back to a checkpoint, and longer than before when it is read again.
        let cut: String = (1..=4).chain(50..=90).map(step).collect();
        fs::write(dir.path().join("new"), cut).unwrap();
        fs::rename(dir.path().join("new"), &path).unwrap();
        let second = read_from(&path, first.to, &first.mark).unwrap();
        assert!(second.reset && second.from == 0);
        assert_eq!(value(&second)["series"]["loss"]["step"][4], 50);
        // Shorter, in place.
        fs::write(&path, step(1)).unwrap();
        let third = read_from(&path, second.to, &second.mark).unwrap();
        assert!(third.reset);
        assert_eq!(value(&third)["series"]["loss"]["step"], json!([1]));
        assert!(nothing(third.to).reset && !nothing(0).reset);
    }

    #[test]
    fn a_long_file_comes_in_parts_with_one_sum() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        append(&path, &(1..=2000).map(step).collect::<String>());
        let file = File::open(&path).unwrap();
        let (mut from, mut sums, mut steps, mut tokens) = (0, Sums::default(), Vec::new(), 0.0);
        let size = file.metadata().unwrap().len();
        while from < size {
            let part = read_part(
                &file,
                Part {
                    from,
                    most: 10_000,
                    fewest: FEWEST,
                },
                sums,
            )
            .unwrap();
            sums = Mark::parse(&part.mark).unwrap().sums;
            let loss = &value(&part)["series"]["loss"];
            steps.extend(
                loss["step"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|step| step.as_u64().unwrap()),
            );
            tokens = loss["tokens"]
                .as_array()
                .unwrap()
                .last()
                .unwrap()
                .as_f64()
                .unwrap();
            from = part.to;
        }
        assert_eq!(steps, (1..=2000).collect::<Vec<_>>());
        assert_eq!(tokens, 20_000.0);
        // A line that is longer than a part is read whole.
        let part = read_part(
            &file,
            Part {
                from: 0,
                most: 8,
                fewest: FEWEST,
            },
            Sums::default(),
        )
        .unwrap();
        assert_eq!(value(&part)["series"]["loss"]["step"][0], 1);
    }
}
