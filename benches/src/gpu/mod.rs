//! Measurements on GPUs, compared with PyTorch in the same run.

pub mod activations;
pub mod context;
pub mod data_parallel;
mod device_clock;
pub mod errors;
pub mod first_use;
pub mod fp8;
pub mod gemm;
pub mod kernels;
pub mod layouts;
pub mod learner;
pub mod models;
pub mod moe;
pub mod nccl;
mod ranks;
pub mod train_step;

use std::{collections::BTreeMap, fs, path::Path};

use crate::Failure;

/// Reads the peer's times in milliseconds by name from lines `NAME\tMILLISECONDS`; other lines are
/// skipped. The same format also carries other numbers, such as GiB.
///
/// # Errors
/// The file cannot be read.
pub fn peer_times(path: Option<&Path>) -> Result<BTreeMap<String, f64>, Failure> {
    let Some(path) = path else {
        return Ok(BTreeMap::new());
    };
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let time = |line: &str| {
        let (name, milliseconds) = line.split_once('\t')?;
        Some((name.to_string(), milliseconds.trim().parse().ok()?))
    };
    Ok(text.lines().filter_map(time).collect())
}
