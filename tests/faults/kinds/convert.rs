//! Conversions that are interrupted.

use std::{
    collections::BTreeSet,
    fs,
    process::Command,
    thread,
    time::{Duration, SystemTime},
};

use nix::sys::signal::Signal;

use crate::{
    case::{Case, STEPS},
    job::{Job, PATIENCE, megaburn},
    shim::FileFault,
};

/// A trained run with a first export. Returns the command that exports it a second time.
fn exported(case: &Case) -> Result<Command, String> {
    case.start(case.train(case.layout, STEPS, &[]))
        .wait(PATIENCE)?
        .expect(&[0])?;
    let target = case.path("out").join("hf");
    fs::create_dir_all(case.path("out")).unwrap();
    let run = case.run().display().to_string();
    let target = target.display().to_string();
    let export = || megaburn(["convert", "export", &run, &target]);
    case.start(export()).wait(PATIENCE)?.expect(&[0])?;
    // A user's folder next to the export must be kept, whatever its name.
    fs::create_dir(case.path("out/hf.tmp-mine")).unwrap();
    let mut again = export();
    again.arg("--force");
    Ok(again)
}

fn beside(case: &Case) -> BTreeSet<String> {
    let entries = fs::read_dir(case.path("out")).unwrap().flatten();
    entries
        .map(|entry| entry.file_name().display().to_string())
        .collect()
}

fn only_the_export(case: &Case) -> Result<(), String> {
    let expected: BTreeSet<String> = ["hf", "hf.tmp-mine"].map(String::from).into();
    if beside(case) == expected {
        Ok(())
    } else {
        Err(format!("beside the export stand {:?}", beside(case)))
    }
}

/// Counts only file operations below `out`, so that the run's are not affected.
fn with_fault(case: &Case, mut command: Command, fault: FileFault, at: u64) -> Command {
    fault.add(&mut command, case, at, None);
    command.env("FILE_FAULT_FOLDER", case.path("out"));
    command
}

/// SIGINT or SIGTERM in the middle of an export leaves either the old or the new export, and
/// nothing else.
pub(super) fn interrupted(case: &Case) -> Result<(), String> {
    let again = exported(case)?;
    let mut job = case.start(with_fault(
        case,
        again,
        FileFault::Stops,
        1 + case.below(12),
    ));
    thread::sleep(Duration::from_millis(300));
    let signal = case.one_of(&[Signal::SIGINT, Signal::SIGTERM]);
    job.signal(signal);
    job.signal(Signal::SIGCONT);
    job.wait(PATIENCE)?.expect(&[0, 128 + signal as i32])?;
    only_the_export(case)
}

/// A killed export never removes the old export from its name, and the next export cleans up its
/// leftovers.
pub(super) fn killed(case: &Case) -> Result<(), String> {
    let again = exported(case)?;
    let mut job: Job = case.start(with_fault(
        case,
        again,
        FileFault::Kill("before"),
        1 + case.below(45),
    ));
    job.wait(PATIENCE)?;
    if !case.path("out/hf/config.json").is_file() {
        return Err(format!(
            "the export is gone from its name: {:?}",
            beside(case)
        ));
    }
    // A new folder with an incomplete mark may belong to a conversion that has just begun, so make
    // it old.
    for name in beside(case)
        .into_iter()
        .filter(|name| name.starts_with("hf."))
    {
        let folder = fs::File::open(case.path("out").join(name)).unwrap();
        folder
            .set_modified(SystemTime::now() - Duration::from_secs(120))
            .unwrap();
    }
    let run = case.run().display().to_string();
    let target = case.path("out/hf");
    let target = target.display().to_string();
    let whole = megaburn(["convert", "export", &run, &target, "--force"]);
    case.start(whole).wait(PATIENCE)?.expect(&[0])?;
    only_the_export(case)
}
