//! Faults of the run's folder: files that others add, remove or change at the same time.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::sys::signal::Signal;

use crate::{
    case::{Case, ENDLESS, ENDS, STEPS},
    check,
    job::{PATIENCE, megaburn},
};

/// Files in the run's folder that do not belong to the run.
const FOREIGN: [&str; 10] = [
    "notes.txt",
    "hf/thesis.txt",
    "hf.tmp-mine/tokenizer.json",
    "before-2024.tmp-mine/metrics.jsonl",
    "checkpoints/notes.txt",
    "checkpoints/best/model.safetensors",
    "checkpoints/step-00000003.tmp-mine/x",
    "checkpoints/step-00000003.replaced-good/manifest.json",
    "checkpoints/step-00000099.tmp-1-2/x",
    "logs/run.log",
];

fn plant(run: &Path) -> BTreeMap<&'static str, Vec<u8>> {
    let plant = |name: &'static str| {
        let path = run.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let bytes = format!("years of work in {name}").into_bytes();
        fs::write(path, &bytes).unwrap();
        (name, bytes)
    };
    FOREIGN.into_iter().map(plant).collect()
}

fn still_there(run: &Path, planted: &BTreeMap<&'static str, Vec<u8>>) -> Result<(), String> {
    for (name, bytes) in planted {
        match fs::read(run.join(name)) {
            Ok(found) if &found == bytes => {}
            Ok(_) => {
                return Err(format!(
                    "`{name}`, which the run did not write, was changed"
                ));
            }
            Err(error) => return Err(format!("`{name}`, which the run did not write: {error}")),
        }
    }
    Ok(())
}

/// A folder with a user's files is refused before anything is written.
pub(super) fn not_a_run(case: &Case) -> Result<(), String> {
    let planted = plant(&case.run());
    let fresh: &[&str] = if case.below(2) == 0 {
        &[]
    } else {
        &["--fresh"]
    };
    let mut command = case.train(case.layout, STEPS, &[]);
    command.args(fresh);
    case.start(command)
        .wait(PATIENCE)?
        .expect(&[2])?
        .says(&["is not empty", "no run"])?;
    still_there(&case.run(), &planted)?;
    for name in ["metrics.jsonl", "config.toml", "run.json", ".lock"] {
        if case.run().join(name).exists() {
            return Err(format!(
                "`{name}` was written into a folder that was refused"
            ));
        }
    }
    // Files with names that a run would write still prevent a start; with any other files it
    // trains.
    let told = || {
        let mut told = case.train(case.layout, STEPS, &["run.allow_other_files=true"]);
        told.args(fresh);
        case.start(told)
    };
    told()
        .wait(PATIENCE)?
        .expect(&[2])?
        .says(&["was not written by megaburn"])?;
    still_there(&case.run(), &planted)?;
    for folder in ["hf", "checkpoints"] {
        fs::rename(case.run().join(folder), case.path(folder)).unwrap();
    }
    told().wait(PATIENCE)?.expect(&[0])?;
    for folder in ["hf", "checkpoints"] {
        let _ = fs::remove_dir_all(case.run().join(folder));
        fs::rename(case.path(folder), case.run().join(folder)).unwrap();
    }
    still_there(&case.run(), &planted)
}

/// Files that a user adds to a live run survive everything that the run does.
pub(super) fn foreign_files(case: &Case) -> Result<(), String> {
    let mut job = case.start_and_wait(2, &["train.checkpoint_interval=1"])?;
    let planted = plant(&case.run());
    let step = check::last_step(&case.run());
    case.wait_for_step(&mut job, step + 3)?;
    job.signal_all(case.dir(), Signal::SIGKILL);
    job.wait(PATIENCE)?;
    let steps = STEPS.max(check::last_checkpoint(&case.run()));
    case.start(case.train(case.layout, steps, &[]))
        .wait(PATIENCE)?
        .expect(&[0])?;
    still_there(&case.run(), &planted)?;
    let mut fresh = case.train(case.layout, STEPS, &[]);
    fresh.arg("--fresh");
    // A foreign file with the name of one of the run's own small files may block a new run.
    case.start(fresh).wait(PATIENCE)?.expect(&[0, 2])?;
    still_there(&case.run(), &planted)
}

/// The folder of a live run is removed: the run ends with an error that names it and does not
/// recreate it.
pub(super) fn removed(case: &Case) -> Result<(), String> {
    let mut job = case.start_and_wait(3, &["train.checkpoint_interval=2"])?;
    let moved = case.path("moved");
    match case.below(2) {
        0 => fs::rename(case.run(), &moved).unwrap(),
        _ => {
            while case.run().exists() {
                let _ = fs::remove_dir_all(case.run());
            }
        }
    }
    let ended = job.wait(Duration::from_secs(20))?;
    case.took(ended.seconds);
    ended.expect(&[1])?.says(&[
        "was removed",
        "was replaced",
        "removed or replaced",
        "no longer",
    ])?;
    if case.run().exists() {
        return Err("the run made its removed folder anew".to_string());
    }
    check::no_processes(case.dir(), Duration::from_secs(2))?;
    if moved.exists() {
        fs::rename(&moved, case.run()).unwrap();
        return case.recover();
    }
    Ok(())
}

/// The metrics are removed during a run: no checkpoint is lost, and the run does not end as for bad
/// input.
pub(super) fn metrics_removed(case: &Case) -> Result<(), String> {
    let mut job = case.start_and_wait(4, &[])?;
    fs::remove_file(case.run().join("metrics.jsonl")).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let saved = check::last_checkpoint(&case.run());
    job.signal(Signal::SIGTERM);
    job.wait(PATIENCE)?.expect(&[0, 1])?;
    if check::last_checkpoint(&case.run()) < saved.max(3) {
        return Err("a committed checkpoint is gone".to_string());
    }
    let steps = check::last_checkpoint(&case.run()) + 3;
    let ended = case
        .start(case.train(case.layout, steps, &[]))
        .wait(PATIENCE)?
        .expect(&[0])?;
    ended.says(&["resumed"])?;
    case.check_nothing_left()
}

/// A second run in the same folder is refused; the first continues unharmed.
pub(super) fn second_run(case: &Case) -> Result<(), String> {
    let mut job = case.start_and_wait(2, &[])?;
    let mut second = case.train(case.any_layout(), ENDLESS, &[]);
    if case.below(2) == 0 {
        second.arg("--fresh");
    }
    case.start(second)
        .wait(PATIENCE)?
        .expect(&[2])?
        .says(&["is in use by a run", "in use"])?;
    let step = check::last_step(&case.run());
    case.wait_for_step(&mut job, step + 3)?;
    job.signal(Signal::SIGTERM);
    job.wait(PATIENCE)?.expect(&[0])?;
    case.recover()
}

/// The next start removes the leftovers of an earlier death.
pub(super) fn leftovers(case: &Case) -> Result<(), String> {
    let mut job = case.start_and_wait(7, &["train.checkpoint_interval=1"])?;
    for _ in 0..3 {
        job.signal_all(case.dir(), Signal::SIGKILL);
        job.wait(PATIENCE)?;
        let mut command = case.train(case.layout, ENDLESS, &["train.checkpoint_interval=1"]);
        let fault = crate::shim::FileFault::Kill("before");
        fault.add(&mut command, case, 30 + case.below(120), None);
        job = case.start(command);
        job.wait(PATIENCE)?;
    }
    case.recover()
}

/// The number of file operations of a start with `--fresh`, up to its first steps.
const FRESH_OPERATIONS: u64 = 40;

/// A `--fresh` run that dies before its first checkpoint loses nothing of the run before it, and
/// the next start does not silently begin from scratch.
pub(super) fn fresh_killed(case: &Case) -> Result<(), String> {
    case.start(case.train(case.layout, 9, &[]))
        .wait(PATIENCE)?
        .expect(&[0])?;
    let weights = |folder: &Path| count(folder, "manifest.json");
    let before = weights(&case.run());
    let mut fresh = case.train(case.layout, ENDLESS, &["train.checkpoint_interval=0"]);
    fresh.arg("--fresh");
    let mut job = case.start(fresh);
    crate::job::wait_until("a step", || job.printed().contains("step"))?;
    job.signal_all(case.dir(), Signal::SIGKILL);
    job.wait(ENDS)?;
    let aside = fs::read_dir(case.run())
        .unwrap()
        .flatten()
        .map(|entry| entry.path());
    let is_aside = |path: &PathBuf| {
        path.file_name()
            .unwrap()
            .display()
            .to_string()
            .starts_with("before-")
    };
    let aside: Vec<PathBuf> = aside.filter(is_aside).collect();
    let [aside] = &aside[..] else {
        return Err(format!("the run before stands in {aside:?}"));
    };
    if weights(aside) != before || check::last_checkpoint(aside) != 9 {
        return Err("--fresh removed checkpoints before the new run had one".to_string());
    }
    // The run that was moved aside resumes in its new place, and the new run starts.
    let steps = STEPS.to_string();
    let resume = [
        "train",
        "--resume",
        &aside.display().to_string(),
        "--steps",
        &steps,
    ];
    case.start(megaburn(resume))
        .wait(PATIENCE)?
        .expect(&[0])?
        .says(&["resumed"])?;
    case.recover()
}

/// `--fresh` is killed while it moves or renames the old run: the next start continues the old run
/// or the new one, and prints which.
pub(super) fn fresh_killed_at_an_operation(case: &Case) -> Result<(), String> {
    case.start(case.train(case.layout, 9, &[]))
        .wait(PATIENCE)?
        .expect(&[0])?;
    let weights = || count(&case.run(), "manifest.json");
    let before = weights();
    let is_kept = || {
        if weights() >= before {
            Ok(())
        } else {
            Err("--fresh removed checkpoints before the new run had one".to_string())
        }
    };
    let mut killed = case.train(case.layout, ENDLESS, &["train.checkpoint_interval=0"]);
    killed.arg("--fresh");
    let fault = crate::shim::FileFault::Kill("before");
    fault.add(
        &mut killed,
        case,
        1 + case.below(FRESH_OPERATIONS),
        case.launched.then_some(0),
    );
    case.start(killed).wait(PATIENCE)?;
    is_kept()?;
    let mut next = case.start(case.train(case.layout, ENDLESS, &["train.checkpoint_interval=0"]));
    let said = ["resumed  after step 9", "note     the previous run is in"];
    crate::job::wait_until("a word about the run before", || {
        said.iter().any(|text| next.printed().contains(text))
    })?;
    next.signal_all(case.dir(), Signal::SIGKILL);
    next.wait(PATIENCE)?;
    is_kept()
}

/// A run is killed while it removes the run that `--fresh` set aside: the next start removes the
/// rest, and continues.
pub(super) fn fresh_killed_in_removal(case: &Case) -> Result<(), String> {
    case.start(case.train(case.layout, 9, &[]))
        .wait(PATIENCE)?
        .expect(&[0])?;
    let is_async = format!("train.async_save={}", case.one_of(&[false, true]));
    let sets = ["train.checkpoint_interval=1", is_async.as_str()];
    let mut fresh = case.train(case.layout, STEPS, &sets);
    fresh.arg("--fresh");
    let when = case.one_of(&["before", "after"]);
    let rank = case.launched.then_some(0);
    crate::shim::FileFault::Kill(when).add(&mut fresh, case, 1 + case.below(4), rank);
    let hit = case.path("hit");
    fresh
        .env("FILE_FAULT_NAME", "Z/checkpoints/step-")
        .env("FILE_FAULT_HIT", &hit);
    case.wait_moving(&mut case.start(fresh))?;
    if !hit.exists() {
        return Err("no process died while it removed the run before".to_string());
    }
    case.recover()?;
    let left = fs::read_dir(case.run()).unwrap().flatten();
    let left = left.map(|entry| entry.file_name().display().to_string());
    let left: Vec<String> = left.filter(|name| name.starts_with("before-")).collect();
    if left.is_empty() {
        Ok(())
    } else {
        Err(format!("the run before is still in {left:?}"))
    }
}

/// How many files with this name are below a folder.
fn count(folder: &Path, name: &str) -> usize {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let of_entry = |entry: fs::DirEntry| match entry.path() {
        path if path.is_dir() => count(&path, name),
        path => usize::from(path.file_name().is_some_and(|found| found == name)),
    };
    entries.map(of_entry).sum()
}
