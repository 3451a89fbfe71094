//! Kills processes that encode at random moments, and compares what others make of their work with
//! what a process makes that nothing disturbs.
//!
//! `MEGABURN_KILL_CASES=100 cargo test -p megaburn-data --test killed` kills as many.

use std::{
    env, fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use megaburn_data::{HfTokenizer, PreprocessConfig, PreprocessEvent};

/// The folder in which a process of these tests encodes.
const FOLDER: &str = "MEGABURN_KILLED_FOLDER";
/// The number of processes to kill.
const CASES: &str = "MEGABURN_KILL_CASES";
const FEW_CASES: usize = 4;
const INPUTS: [&str; 2] = ["a.jsonl", "b.json"];

/// Not a test, but the process that others kill: it prints a line for each event.
#[test]
fn encode() {
    let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else {
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
    println!("written {}", summary.unwrap().counts.documents);
}

/// Random words as lines of JSON.
fn lines(draw: &mut fastrand::Rng, num_bytes: usize) -> String {
    let words: Vec<String> = (0..1000)
        .map(|_| (0..draw.usize(1..9)).map(|_| draw.lowercase()).collect())
        .collect();
    let mut lines = String::new();
    while lines.len() < num_bytes {
        let text = (0..draw.usize(0..2000)).map(|_| words[draw.usize(..words.len())].as_str());
        lines += &format!("{{\"text\": \"{}\"}}\n", text.collect::<Vec<_>>().join(" "));
    }
    lines
}

/// The files of a folder, with their contents.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let with_content = |path: PathBuf| {
        let content = fs::read(&path).unwrap();
        (path.strip_prefix(folder).unwrap().into(), content)
    };
    let mut files: Vec<_> = paths.map(with_content).collect();
    files.sort();
    files
}

fn start(folder: &Path) -> Child {
    Command::new(env::current_exe().unwrap())
        .args(["--exact", "encode", "--nocapture"])
        .env(FOLDER, folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Encodes to the end. Returns what was printed.
fn finish(folder: &Path) -> String {
    let ended = start(folder).wait_with_output().unwrap();
    let shown = String::from_utf8(ended.stdout).unwrap();
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{shown}\n{errors}");
    assert!(shown.contains("written "), "{shown}");
    shown
}

/// Starts a process and kills it after a number of events and some time. Returns whether it was
/// still running.
fn kill(folder: &Path, num_events: usize, time: Duration) -> bool {
    let mut process = start(folder);
    let shown = BufReader::new(process.stdout.take().unwrap());
    let events = shown
        .lines()
        .filter(|line| line.as_ref().unwrap().contains("event"));
    events.take(num_events).for_each(drop);
    let moment = Instant::now() + time;
    while Instant::now() < moment {
        std::hint::spin_loop();
    }
    process.kill().unwrap();
    !process.wait().unwrap().success()
}

#[test]
fn what_a_killed_process_leaves_is_continued_to_the_same_files() {
    let num_cases = env::var(CASES).map_or(FEW_CASES, |cases| cases.parse().unwrap());
    let seed = fastrand::u64(..);
    let mut draw = fastrand::Rng::with_seed(seed);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(INPUTS[0]), lines(&mut draw, 3 << 20)).unwrap();
    let array = lines(&mut draw, 1 << 20).trim_end().replace('\n', ",\n");
    fs::write(dir.path().join(INPUTS[1]), format!("[{array}]")).unwrap();
    let whole = dir.path().join("whole");
    fs::create_dir(&whole).unwrap();
    let begun = Instant::now();
    let num_events = finish(&whole).matches("event").count();
    let time = begun.elapsed();
    let expected = files(&whole);
    assert_eq!(expected.len(), 3);

    let (mut killed, mut left, mut resumed) = (0, 0, 0);
    for case in 0..num_cases {
        let folder = dir.path().join(case.to_string());
        fs::create_dir(&folder).unwrap();
        for _ in 0..draw.usize(1..4) {
            let time = time.mul_f64(draw.f64() * 0.3);
            killed += usize::from(kill(&folder, draw.usize(0..=num_events), time));
            if folder.join("out.idx").exists() {
                break;
            }
        }
        if !folder.join("out.idx").exists() || folder.join("out.megaburn-part").exists() {
            left += 1;
            resumed += usize::from(finish(&folder).contains("resumed"));
        }
        assert!(
            files(&folder) == expected,
            "other files, case {case}, seed {seed}"
        );
        fs::remove_dir_all(&folder).unwrap();
    }
    println!("{killed} killed in {num_cases} cases; {left} left work, {resumed} of it saved");
}
