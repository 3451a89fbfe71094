//! Indices of samples that are built, by several processes at a time.

use std::{fs, path::Path, sync::Arc, time::Instant};

use megaburn_data::{
    BlendedDatasetConfig, ByteTokenizer, GptDatasetConfig, IndexEvent, IndexedDataset,
    PreprocessConfig, Samples, SequenceRange,
};

use crate::process::{end, files, finish, folder, kill, num_cases, start, words};

pub(crate) const JOB: &str = "index::build_index";
const SETS: [&str; 2] = ["one", "two"];
const SEQ_LEN: usize = 16;
const NUM_SAMPLES: u64 = 60_000;

/// Not a test, but the process that others kill: it prints a line for each event, and a hash of
/// samples at the end.
#[test]
fn build_index() {
    let Some(folder) = folder() else {
        return;
    };
    let open = |name: &str| {
        let set = IndexedDataset::open(folder.parent().unwrap().join(name));
        SequenceRange::all(Arc::new(set.unwrap()))
    };
    let sets = SETS.map(open);
    let gpt = GptDatasetConfig::new(SEQ_LEN, 260, folder.join("cache"));
    let gpt = gpt.with_num_samples(NUM_SAMPLES);
    let blend = BlendedDatasetConfig::new(gpt).with_weights(vec![0.3, 0.7]);
    let report = |event| match event {
        IndexEvent::Damaged { path, why } => println!("damaged {}: {why}", path.display()),
        IndexEvent::Waiting { .. } => println!("waiting"),
        _ => println!("event"),
    };
    let blend = match blend.build(&sets, report) {
        Ok(blend) => blend,
        Err(error) => return println!("refused {error}"),
    };
    let mut sum = 0u64;
    for index in (0..blend.num_samples()).step_by(97) {
        for token in blend.tokens(index).unwrap() {
            sum = sum.wrapping_mul(31).wrapping_add(token.into());
        }
    }
    println!("written {sum}");
}

fn data_set(dir: &Path, name: &str, draw: &mut fastrand::Rng) {
    let input = dir.join(format!("{name}.jsonl"));
    let lines = words(draw, 300_000).into_iter();
    // Many short documents.
    let lines: String = lines
        .flat_map(|line| {
            line.split_inclusive(' ')
                .map(String::from)
                .collect::<Vec<_>>()
        })
        .map(|word| format!("{{\"text\": \"{word}\"}}\n"))
        .collect();
    fs::write(&input, lines).unwrap();
    let config = PreprocessConfig::new(vec![input], dir.join(name));
    config.run(&ByteTokenizer, |_| ()).unwrap();
}

/// Writes the data sets of which samples are read.
pub(crate) fn write_sets(dir: &Path, draw: &mut fastrand::Rng) {
    SETS.iter().for_each(|name| data_set(dir, name, draw));
}

/// The line with the hash of samples.
fn written(shown: &str) -> String {
    let line = shown.lines().find(|line| line.contains("written "));
    line.unwrap().into()
}

#[test]
fn an_index_is_built_whole_or_not_at_all() {
    let num_cases = num_cases();
    let seed = fastrand::u64(..);
    let mut draw = fastrand::Rng::with_seed(seed);
    let dir = tempfile::tempdir().unwrap();
    write_sets(dir.path(), &mut draw);
    let whole = dir.path().join("whole");
    let begun = Instant::now();
    let shown = finish(JOB, &whole);
    let time = begun.elapsed();
    let num_events = shown.matches("event").count();
    let expected = (files(&whole), written(&shown));
    assert_eq!((expected.0.len(), num_events), (2 * 4 + 3, 3));

    let (mut killed, mut left) = (0, 0);
    for case in 0..num_cases {
        let folder = dir.path().join(case.to_string());
        let others: Vec<_> = (0..draw.usize(0..3)).map(|_| start(JOB, &folder)).collect();
        let process = start(JOB, &folder);
        let time = time.mul_f64(draw.f64() * 0.5);
        killed += usize::from(kill(process, draw.usize(0..=num_events), time));
        let is_alone = others.is_empty() && folder.join("cache").exists();
        left += usize::from(is_alone && files(&folder) != expected.0);
        let mut shown: Vec<String> = others.into_iter().map(end).collect();
        shown.push(finish(JOB, &folder));
        for shown in &shown {
            assert!(
                !shown.contains("damaged"),
                "case {case}, seed {seed}: {shown}"
            );
            assert_eq!(written(shown), expected.1, "case {case}, seed {seed}");
        }
        assert!(
            files(&folder) == expected.0,
            "other files, case {case}, seed {seed}"
        );
        fs::remove_dir_all(&folder).unwrap();
    }
    println!("{killed} killed in {num_cases} cases; {left} without others left work");
}
