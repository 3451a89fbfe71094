//! Checkpoints that are written while training continues.

use std::{collections::BTreeMap, fs, path::Path};

use burn::prelude::Device;
use megaburn::train::{TrainConfig, TrainError, config::Dtype};

use crate::{
    Test,
    steps::{trainer, with_config},
};
use megaburn_kernel_tests::part;

pub(crate) const TESTS: &[Test] = &[(
    "an_asynchronous_save_holds_the_values_of_its_start",
    asynchronous,
)];

/// The bytes of files, by their names.
type Files = BTreeMap<String, Vec<u8>>;

/// The files of the only checkpoint of a run.
fn files(run: &Path) -> Result<Files, String> {
    let read = || -> std::io::Result<Files> {
        let mut files = BTreeMap::new();
        for checkpoint in fs::read_dir(run.join("checkpoints"))? {
            for file in fs::read_dir(checkpoint?.path())? {
                let file = file?;
                let name = file.file_name().to_string_lossy().into_owned();
                files.insert(name, fs::read(file.path())?);
            }
        }
        Ok(files)
    };
    read().map_err(|error| error.to_string())
}

/// Saves the state after two steps; the asynchronous save is finished two steps later. Returns the
/// files and the losses of all steps, and of two steps after a resume.
fn saved(config: &TrainConfig, is_async: bool) -> Result<(Files, Vec<u64>), String> {
    let run = Path::new(&config.run.dir);
    // The folder may be that of the case before.
    let _ = fs::remove_dir_all(run);
    let train = || -> Result<Vec<u64>, TrainError> {
        let mut losses = Vec::new();
        let mut first = trainer(config, Device::cuda(0))?;
        let mut steps = |trainer: &mut megaburn::train::Trainer| -> Result<(), TrainError> {
            for _ in 0..2 {
                losses.push(trainer.step()?.loss.to_bits());
            }
            Ok(())
        };
        steps(&mut first)?;
        if is_async {
            let save = first.begin_save()?;
            steps(&mut first)?;
            first.finish_save(save)?;
        } else {
            first.save()?;
            steps(&mut first)?;
        }
        drop(first);
        let mut resumed = trainer(config, Device::cuda(0))?;
        resumed.resume()?;
        steps(&mut resumed)?;
        Ok(losses)
    };
    let losses = train().map_err(|error| error.to_string())?;
    Ok((files(run)?, losses))
}

fn asynchronous() -> Result<(), String> {
    let dir = std::env::temp_dir().join(format!("megaburn-saves-{}", std::process::id()));
    let found = with_config(|mut config| {
        config.run.dir = dir.display().to_string();
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            for fraction in [0.0, 0.5, 1.0].into_iter().filter(|_| part::is_mine()) {
                config.train.dtype = dtype;
                config.optimizer.cpu_offload_fraction = fraction;
                let what = format!("{dtype}, {fraction} in host memory");
                let expected = saved(&config, false)?;
                let found = saved(&config, true)?;
                if found.1 != expected.1 {
                    return Err(format!(
                        "{what}: losses {:?}, not {:?}",
                        found.1, expected.1
                    ));
                }
                if expected.1[2..4] != expected.1[4..6] {
                    return Err(format!("{what}: a resume is not exact: {:?}", expected.1));
                }
                if expected.0.is_empty() {
                    return Err(format!("{what}: nothing was saved"));
                }
                for (name, bytes) in &expected.0 {
                    if found.0.get(name) != Some(bytes) {
                        return Err(format!("{what}: {name} differs"));
                    }
                }
            }
        }
        Ok(())
    });
    // Temporary files may stay if they cannot be removed.
    let _ = fs::remove_dir_all(&dir);
    found
}
