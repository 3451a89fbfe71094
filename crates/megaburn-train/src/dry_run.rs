//! What a start of a run checks, without a model in memory: `train --dry-run`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use megaburn_checkpoint::{Checkpoint, newest};
use megaburn_collective::{Progress, RankEnv};
use megaburn_mesh::Layout;
use megaburn_models::DecoderConfig;
use megaburn_report::{console::human_number, describe_layout};

use crate::{
    config::{Change, InitFrom, TrainConfig},
    data::{DefaultText, RunData},
    error::TrainError,
    estimate::{MemoryEstimate, RankParams, Scores},
    resume_error::ResumeError,
    run::find_place,
    run_folder::{Marker, names::CHECKPOINTS},
    trainer::{Reading, changes_since, check_model, check_reading, read_state},
    trainer_core::{first_suspect, starts_again, suspects_of},
};

/// Checks everything that a start of this run checks before it trains: the configuration, the
/// layout, the devices, the data, the run's folder and its newest checkpoint. Neither the model nor
/// the optimizer is allocated, and nothing is written, but for the cache of a large text, which the
/// run would write too. Checkpoints in `train.checkpoint_store` and `train.local_checkpoint_dir`
/// are not looked at.
///
/// Returns what was found, as lines for the console.
///
/// # Errors
/// The error that the run would end with.
pub fn dry_run(
    config: &TrainConfig,
    fresh: bool,
    default_text: DefaultText,
) -> Result<Vec<String>, TrainError> {
    let env = RankEnv::from_env()?;
    let (layout, devices, _) = find_place(config, env.as_ref(), fresh)?;
    let start = config.start(fresh)?;
    let data = RunData::load_with(config, start.as_ref(), default_text, &Progress::none())?;
    let model = config.check_start(&layout, start.as_ref(), &data)?;
    check_writable(Path::new(&config.run.dir))?;
    let resumed = match fresh {
        true => Resumes::Anew(None),
        false => resumed(config, &layout, &model, &data)?,
    };
    let params = RankParams::of_stages(config, &layout, &model)?;
    let memory = MemoryEstimate::of_params(config, &layout, &model, &params, Scores::Never)?;
    let memory = memory.iter().map(MemoryEstimate::total).max();
    let mut lines = vec![format!("layout   {}", describe_layout(&layout))];
    lines.extend(
        devices
            .describe(layout.world_size(), &env)
            .map(|gpus| format!("device   {gpus}")),
    );
    lines.push(format!(
        "model    {}, {} parameters in {}: {}",
        model.family,
        human_number(model.whole_plan()?.num_global() as f64),
        config.train.dtype,
        model.summary()
    ));
    if let Some(InitFrom::Init(source)) = &start {
        lines.push(format!("weights  {}", source.path().display()));
    }
    lines.push(format!("data     {}", data.description));
    lines.push(format!(
        "memory   {}B on a rank for parameters, gradients, optimizer state and activations",
        human_number(memory.unwrap_or(0) as f64)
    ));
    lines.extend(described(config, resumed));
    Ok(lines)
}

/// From what a start of the run would continue.
enum Resumes {
    /// From nothing, although there is this suspect checkpoint.
    Anew(Option<PathBuf>),
    From(Box<Found>),
}

/// The checkpoint from which the run resumes.
struct Found {
    checkpoint: Checkpoint,
    step: u64,
    changes: Vec<Change>,
}

/// The newest checkpoint of the run, after checking that the run can continue from it.
fn resumed(
    config: &TrainConfig,
    layout: &Layout,
    model: &DecoderConfig,
    data: &RunData,
) -> Result<Resumes, TrainError> {
    let checkpoints = Path::new(&config.run.dir).join(CHECKPOINTS);
    let latest = newest(&checkpoints)?;
    let Some(checkpoint) = latest.checkpoint else {
        return match latest.refused.into_iter().next() {
            None => {
                let run = Path::new(&config.run.dir);
                let marker = Marker::read(run)?;
                let run_id = marker.as_ref().map(|marker| marker.run_id.as_str());
                let suspects = suspects_of(&checkpoints, run_id)?;
                Ok(Resumes::Anew(first_suspect(suspects, run)?))
            }
            Some(refused) => Err(ResumeError::AllDamaged {
                path: refused.path,
                why: refused.why,
            }
            .into()),
        };
    };
    check_model(&checkpoint, model)?;
    if checkpoint.trainer().is_null() {
        // An imported model, which has weights only.
        return Ok(Resumes::From(Box::new(Found {
            step: 0,
            checkpoint,
            changes: Vec::new(),
        })));
    }
    let saved = read_state(&checkpoint)?;
    let name = config.optimizer.name.to_string();
    if saved.optimizer != name {
        let what = format!(
            "was trained with another optimizer: optimizer.name is {} there and {name} here",
            saved.optimizer
        );
        let path = checkpoint.path().into();
        return Err(ResumeError::OtherOptimizer { path, what }.into());
    }
    let reading = Reading {
        seed: config.run.seed,
        seq_len: config.data.seq_len,
        blend: data.samples(config)?.blend,
        document_multiple: config.data.split_into(),
    };
    check_reading(&checkpoint, &reading)?;
    let changes = changes_since(&checkpoint, config, layout, model)?;
    Ok(Resumes::From(Box::new(Found {
        step: saved.progress.step,
        checkpoint,
        changes: changes.unwrap_or_default(),
    })))
}

fn described(config: &TrainConfig, resumes: Resumes) -> Vec<String> {
    let dir = &config.run.dir;
    let steps = config.train.steps;
    let found = match resumes {
        Resumes::Anew(suspect) => {
            let warning = suspect.map(|path| format!("warning  {}", starts_again(&path)));
            let start = format!("run      {dir}: would start at step 1 of {steps}");
            return warning.into_iter().chain([start]).collect();
        }
        Resumes::From(found) => found,
    };
    let path = found.checkpoint.path().display();
    let mut lines = vec![match found.step {
        step if step >= steps => format!("run      {dir}: is complete at step {step} of {steps}"),
        step => format!("run      {dir}: would resume after step {step} of {steps} from {path}"),
    }];
    let changes = found
        .changes
        .iter()
        .map(|change| format!("changed  {change}"));
    lines.extend(changes);
    lines
}

/// Checks that a run can write into its folder, or can make it, by writing and removing an empty
/// file.
fn check_writable(dir: &Path) -> Result<(), TrainError> {
    let fail = |source: io::Error| TrainError::Write {
        path: dir.to_path_buf(),
        source,
    };
    // The nearest folder that exists: the run would make the others.
    let there = dir
        .ancestors()
        .find(|folder| folder.as_os_str().is_empty() || folder.exists());
    let there = match there {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let probe = there.join(format!(".dry-run-{}", std::process::id()));
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&probe)
        .map_err(fail)?;
    fs::remove_file(&probe).map_err(fail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_writable_if_it_can_be_made_and_nothing_stays() {
        let dir = tempfile::tempdir().unwrap();
        check_writable(&dir.path().join("a/b")).unwrap();
        check_writable(dir.path()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        fs::write(dir.path().join("file"), "").unwrap();
        check_writable(&dir.path().join("file/run")).unwrap_err();
    }
}
