//! The steps of a range, found by bisection: lines are in the order of their steps.

use std::{fs::File, io, os::unix::fs::FileExt, path::Path};

use serde_json::Value;

use super::{
    mark::Sums,
    read::{Metrics, PART, Part, nothing, read_part},
};

/// The most bytes of a line that are looked at for its step.
const HEAD: usize = 1 << 16;

/// The number of steps of a range to which it is thinned out if it has more.
const POINTS: u64 = 8000;

/// Reads the steps from `first` to `last`. The tokens and seconds of these points
/// count from `first`. Steps of more than a part of a file are not read: the answer says so.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn read_steps(path: &Path, first: u64, last: u64) -> io::Result<Metrics> {
    let file = File::open(path)?;
    let begin = offset_of(&file, first)?;
    let end = offset_of(&file, last.saturating_add(1))?;
    if end <= begin {
        return Ok(nothing(0));
    }
    if end - begin > PART {
        return Ok(nothing(0).with_too_many());
    }
    let part = Part {
        from: begin,
        most: end - begin,
        fewest: POINTS,
    };
    read_part(&file, part, Sums::default())
}

/// The offset of the first line whose step is at least `step`; the size of the file if there is
/// none.
fn offset_of(file: &File, step: u64) -> io::Result<u64> {
    // All lines that begin before `low` are of earlier steps; the line at or after `high` is not.
    let (mut low, mut high) = (0, file.metadata()?.len());
    while low < high {
        let middle = low + (high - low) / 2;
        match step_line_after(file, middle, high)? {
            Some((_, end, found)) if found < step => low = end,
            _ => high = middle,
        }
    }
    Ok(step_line_after(file, low, u64::MAX)?.map_or(low, |(begin, ..)| begin))
}

/// The first line of a step that begins at `at` or after it and before `limit`: where it begins,
/// where the next line does, and its step.
fn step_line_after(file: &File, at: u64, limit: u64) -> io::Result<Option<(u64, u64, u64)>> {
    let mut begin = match at {
        0 => 0,
        at => match line_feed_after(file, at - 1)? {
            Some(feed) => feed + 1,
            None => return Ok(None),
        },
    };
    while begin < limit {
        let Some(feed) = line_feed_after(file, begin)? else {
            return Ok(None);
        };
        let mut line = vec![0; ((feed - begin) as usize).min(HEAD)];
        file.read_exact_at(&mut line, begin)?;
        if let Some(step) = step_of(&line) {
            return Ok(Some((begin, feed + 1, step)));
        }
        begin = feed + 1;
    }
    Ok(None)
}

/// The step of a line that a run wrote: `step` is its first key.
fn step_of(line: &[u8]) -> Option<u64> {
    let rest = line.strip_prefix(b"{\"step\":")?;
    let end = rest.iter().position(|byte| !byte.is_ascii_digit())?;
    serde_json::from_slice::<Value>(&rest[..end]).ok()?.as_u64()
}

fn line_feed_after(file: &File, mut at: u64) -> io::Result<Option<u64>> {
    let mut bytes = [0; 4096];
    loop {
        let read = file.read_at(&mut bytes, at)?;
        if read == 0 {
            return Ok(None);
        }
        if let Some(found) = bytes[..read].iter().position(|byte| *byte == b'\n') {
            return Ok(Some(at + found as u64));
        }
        at += read as u64;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn write(path: &Path, lines: impl Iterator<Item = String>) {
        let text: Vec<String> = lines.collect();
        fs::write(path, text.join("\n") + "\n").unwrap();
    }

    fn steps(path: &Path, first: u64, last: u64) -> Vec<u64> {
        let found = serde_json::to_value(read_steps(path, first, last).unwrap()).unwrap();
        let steps = found["series"]["loss"]["step"].as_array();
        let steps = steps.map_or(Vec::new(), |steps| steps.clone());
        steps.iter().map(|step| step.as_u64().unwrap()).collect()
    }

    #[test]
    fn exactly_the_steps_of_a_range_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let line = |step: u64| match step % 7 {
            0 => format!("{{\"checkpoint\":{step}}}\n{{\"step\":{step},\"loss\":1}}"),
            _ => format!("{{\"step\":{step},\"loss\":0.5}}\n{{\"step\":{step},\"eval_loss\":2}}"),
        };
        write(&path, (1..=500).map(line));
        for (first, last) in [
            (1, 500),
            (1, 1),
            (7, 7),
            (8, 13),
            (123, 456),
            (499, 900),
            (0, 3),
        ] {
            let expected: Vec<u64> = (first.max(1)..=last.min(500)).collect();
            assert_eq!(steps(&path, first, last), expected, "{first} to {last}");
        }
        // A small part of a long file, of which each point is read.
        write(
            &path,
            (1..=20_000).map(|step| format!("{{\"step\":{step},\"loss\":0.5}}")),
        );
        assert_eq!(steps(&path, 5001, 7000), (5001..=7000).collect::<Vec<_>>());
        assert!(steps(&path, 1, 12_000).len() < 8000);
        write(&path, (1..=500).map(line));
        assert_eq!(steps(&path, 600, 700), [0; 0]);
        assert_eq!(steps(&path, 9, 8), [0; 0]);
        fs::write(&path, "").unwrap();
        assert_eq!(steps(&path, 1, 5), [0; 0]);
    }

    #[test]
    fn a_range_that_is_too_long_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m");
        let note = "x".repeat(1 << 20);
        write(
            &path,
            (1..=20).map(|step| format!("{{\"step\":{step},\"loss\":1,\"note\":\"{note}\"}}")),
        );
        let found = serde_json::to_value(read_steps(&path, 1, 20).unwrap()).unwrap();
        assert_eq!(found["too_many"], true);
        assert_eq!(steps(&path, 3, 5), [3, 4, 5]);
    }
}
