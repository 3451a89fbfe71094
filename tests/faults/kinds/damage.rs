//! Files of a run that are damaged between two starts.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    case::{Case, STEPS},
    check,
    job::{PATIENCE, megaburn},
};

/// Trains to step 9 with checkpoints of steps 6 and 9.
fn train_some(case: &Case) -> Result<(), String> {
    case.start(case.train(case.layout, 9, &[]))
        .wait(PATIENCE)?
        .expect(&[0])?;
    match check::checkpoint_steps(&case.run()).as_slice() {
        [.., 6, 9] => Ok(()),
        found => Err(format!("checkpoints of steps {found:?}, expected 6 and 9")),
    }
}

fn checkpoint(case: &Case, step: u64) -> PathBuf {
    case.checkpoints().join(format!("step-{step:08}"))
}

/// Damages one file of a checkpoint, in one of the ways in which disks and users do.
fn damage(case: &Case, folder: &Path) -> Result<(), String> {
    let entries = fs::read_dir(folder).map_err(|error| error.to_string())?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.is_file() && !path.ends_with("manifest.xxh3"));
    files.sort();
    let path = &files[case.below(files.len() as u64) as usize];
    let mut bytes = fs::read(path).unwrap();
    let middle = case.below(bytes.len() as u64) as usize;
    match case.below(5) {
        0 => bytes[middle] ^= 1 << case.below(8),
        1 => bytes.truncate(middle),
        2 => bytes[middle..].fill(0x5a),
        3 => return fs::remove_file(path).map_err(|error| error.to_string()),
        _ => bytes.extend([0; 17]),
    }
    fs::write(path, bytes).map_err(|error| error.to_string())
}

/// The checkpoint before the damaged one is used, and the start reports it.
pub(super) fn newest(case: &Case) -> Result<(), String> {
    train_some(case)?;
    damage(case, &checkpoint(case, 9))?;
    let ended = case
        .start(case.train(case.layout, STEPS, &[]))
        .wait(PATIENCE)?
        .expect(&[0])?;
    ended.says(&["after step 6"])?.says(&["step-00000009"])?;
    case.recover()
}

/// `generate` and `convert export` use the older intact checkpoint too, and report which one is
/// damaged.
pub(super) fn readers(case: &Case) -> Result<(), String> {
    train_some(case)?;
    damage(case, &checkpoint(case, 9))?;
    let run = case.run().display().to_string();
    let generate = ["generate", &run, "--prompt", "a", "--max-tokens", "2"].map(String::from);
    let ended = case
        .start(megaburn(generate))
        .wait(PATIENCE)?
        .expect(&[0])?;
    ended.says(&["step-00000009"])?;
    let out = case.path("hf").display().to_string();
    let export = ["convert", "export", &run, &out].map(String::from);
    let ended = case.start(megaburn(export)).wait(PATIENCE)?.expect(&[0])?;
    ended.says(&["step-00000009"])?;
    case.recover()
}

/// All checkpoints are damaged: the start is refused and removes nothing.
pub(super) fn all(case: &Case) -> Result<(), String> {
    train_some(case)?;
    for step in check::checkpoint_steps(&case.run()) {
        damage(case, &checkpoint(case, step))?;
    }
    let files = || {
        let entries = fs::read_dir(case.checkpoints()).unwrap().flatten();
        entries.filter(|entry| entry.path().is_dir()).count()
    };
    let before = files();
    let ended = case
        .start(case.train(case.layout, STEPS, &[]))
        .wait(PATIENCE)?
        .expect(&[2])?;
    ended.says(&["step-0000000"])?;
    if files() == before {
        Ok(())
    } else {
        Err("the refused start removed a checkpoint".to_string())
    }
}

/// A damaged checkpoint does not count towards `train.keep_checkpoints`.
pub(super) fn then_kept(case: &Case) -> Result<(), String> {
    train_some(case)?;
    damage(case, &checkpoint(case, 9))?;
    let sets = ["train.checkpoint_interval=1", "train.keep_checkpoints=2"];
    let stop = 6 + 1 + case.below(5);
    let mut job = case.start(case.train(case.layout, stop, &sets));
    job.wait(PATIENCE)?.expect(&[0])?;
    let whole = |step: &u64| {
        let source = checkpoint(case, *step).display().to_string();
        let out = case.path("export").display().to_string();
        let export = ["convert", "export", &source, &out, "--force"].map(String::from);
        let ended = case.start(megaburn(export)).wait(PATIENCE);
        ended.is_ok_and(|ended| ended.code == 0)
    };
    let steps = check::checkpoint_steps(&case.run());
    let count = steps.iter().filter(|step| whole(step)).count();
    if count < 2 {
        return Err(format!(
            "{count} of the checkpoints {steps:?} are whole, 2 should be"
        ));
    }
    case.recover()
}

/// A run that started from a model resumes without it, even if its newest checkpoint is damaged.
pub(super) fn init_gone(case: &Case) -> Result<(), String> {
    let source = case.path("source");
    let dir = format!("run.dir={}", source.display());
    case.start(case.train(case.layout, 2, &[&dir]))
        .wait(PATIENCE)?
        .expect(&[0])?;
    let init = format!("model.init={}", source.display());
    let own = ["optimizer.lr=1e-3", &init];
    case.start(case.train(case.layout, 9, &own))
        .wait(PATIENCE)?
        .expect(&[0])?;
    fs::remove_dir_all(&source).unwrap();
    if case.below(2) == 0 {
        damage(case, &checkpoint(case, 9))?;
    }
    let ended = case
        .start(case.train(case.layout, STEPS, &own))
        .wait(PATIENCE)?;
    ended.expect(&[0])?.says(&["resumed"])?;
    case.check_nothing_left()
}

/// The last line of the metrics is torn, as after a power loss.
pub(super) fn metrics_torn(case: &Case) -> Result<(), String> {
    train_some(case)?;
    let path = case.run().join("metrics.jsonl");
    let mut bytes = fs::read(&path).unwrap();
    // Lines that were synced with the checkpoint of step 9 stay intact.
    let more = b"{\"step\":10,\"loss\":5.1,\"grad_norm\":1.0}\n{\"step\":11,\"loss\":4.";
    bytes.extend(&more[..1 + case.below(more.len() as u64 - 1) as usize]);
    fs::write(&path, bytes).unwrap();
    case.recover()
}

/// The resolved configuration was emptied, as happens when a disk is full while a file is rewritten
/// in place.
pub(super) fn config_emptied(case: &Case) -> Result<(), String> {
    train_some(case)?;
    fs::write(case.run().join("config.toml"), "").unwrap();
    let ended = case
        .start(case.train(case.layout, STEPS, &[]))
        .wait(PATIENCE)?;
    ended.expect(&[0])?.says(&["after step 9"])?;
    case.recover()
}
