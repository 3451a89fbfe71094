//! Data sets that are encoded.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use megaburn_data::{HfTokenizer, PreprocessConfig, PreprocessEvent};

use crate::process::{files, finish, folder, kill, num_cases, start, words};

pub(crate) const JOB: &str = "preprocess::encode";
const INPUTS: [&str; 3] = ["a.jsonl", "b.json", "c.txt"];

/// Not a test, but the process that others kill: it prints a line for each event.
#[test]
fn encode() {
    let Some(folder) = folder() else {
        return;
    };
    let tokenizers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizers");
    let tokenizer = HfTokenizer::open(tokenizers.join("byte-level")).unwrap();
    let inputs = INPUTS.map(|name| folder.parent().unwrap().join(name));
    let config = PreprocessConfig::new(inputs.to_vec(), folder.join("out"))
        .with_append_eod(true)
        .with_num_workers(fastrand::usize(1..4))
        .with_save_interval(Duration::ZERO);
    let summary = config.run(&tokenizer, |event| match event {
        PreprocessEvent::Resumed(counts) => println!("resumed {}", counts.documents),
        _ => println!("event"),
    });
    match summary {
        Ok(summary) => println!("written {}", summary.counts.documents),
        Err(error) => println!("refused {error}"),
    }
}

/// Random words as lines of JSON.
fn lines(draw: &mut fastrand::Rng, num_bytes: usize) -> String {
    let lines = words(draw, num_bytes).into_iter();
    lines
        .map(|line| format!("{{\"text\": \"{line}\"}}\n"))
        .collect()
}

/// Writes the files that are encoded.
pub(crate) fn write_inputs(dir: &Path, draw: &mut fastrand::Rng) {
    fs::write(dir.join(INPUTS[0]), lines(draw, 2 << 20)).unwrap();
    let array = lines(draw, 1 << 20).trim_end().replace('\n', ",\n");
    fs::write(dir.join(INPUTS[1]), format!("[{array}]")).unwrap();
    // One document of several pieces.
    let text = words(draw, 2 << 20).join("\n");
    fs::write(dir.join(INPUTS[2]), text).unwrap();
}

#[test]
fn what_a_killed_process_leaves_is_continued_to_the_same_files() {
    let num_cases = num_cases();
    let seed = fastrand::u64(..);
    let mut draw = fastrand::Rng::with_seed(seed);
    let dir = tempfile::tempdir().unwrap();
    write_inputs(dir.path(), &mut draw);
    let whole = dir.path().join("whole");
    fs::create_dir(&whole).unwrap();
    let begun = Instant::now();
    let num_events = finish(JOB, &whole).matches("event").count();
    let time = begun.elapsed();
    let expected = files(&whole);
    assert_eq!(expected.len(), 3);

    let (mut killed, mut left, mut resumed) = (0, 0, 0);
    for case in 0..num_cases {
        let folder = dir.path().join(case.to_string());
        fs::create_dir(&folder).unwrap();
        for _ in 0..draw.usize(1..4) {
            let time = time.mul_f64(draw.f64() * 0.3);
            let process = start(JOB, &folder);
            killed += usize::from(kill(process, draw.usize(0..=num_events), time));
            if folder.join("out.idx").exists() {
                break;
            }
        }
        let part = folder.join("out.megaburn-part");
        if !folder.join("out.idx").exists() || part.join("journal").exists() {
            left += 1;
            resumed += usize::from(finish(JOB, &folder).contains("resumed"));
        } else if part.exists() {
            // Of a process that had finished, only the empty folder is left.
            let shown = start(JOB, &folder).wait_with_output().unwrap().stdout;
            let shown = String::from_utf8(shown).unwrap();
            assert!(
                shown.contains("refused "),
                "case {case}, seed {seed}: {shown}"
            );
        }
        assert!(!part.exists(), "case {case}, seed {seed}");
        assert!(
            files(&folder) == expected,
            "other files, case {case}, seed {seed}"
        );
        fs::remove_dir_all(&folder).unwrap();
    }
    println!("{killed} killed in {num_cases} cases; {left} left work, {resumed} of it saved");
}
