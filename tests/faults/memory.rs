//! Flips a bit of the weights in the memory of a rank, as a failing chip does.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::ErrorKind,
    os::unix::fs::FileExt,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use crate::{check, job::PATIENCE, restarted::Restarted};

/// The number of weights by which a place in memory is recognised.
const NUM_WEIGHTS: usize = 16;
/// How far some updates move a weight at most.
const NEAR: f32 = 0.01;
/// The weights of a norm are all alike, so a place with a smaller spread is not used.
const SPREAD: f32 = 0.04;

/// Flips a bit of the weights of a rank. The weights in the newest checkpoint show where they are.
pub(crate) fn flip_bit(run: &Restarted<'_>) -> Result<(), String> {
    let from = Instant::now();
    while from.elapsed() < PATIENCE {
        // Without an older one, nothing would be left to continue from.
        if let [.., _, newest] = check::checkpoint_steps(&run.case.run())[..]
            && flip_bit_of(run, newest)?
        {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(5));
    }
    Err("no rank has weights near those of the newest checkpoint in memory".into())
}

/// Flips a bit of weights whose values are near those in a checkpoint. Returns `false` if memory has none.
fn flip_bit_of(run: &Restarted<'_>, step: u64) -> Result<bool, String> {
    let rank = run.case.below(run.num_ranks() as u64) as usize;
    let name = format!("step-{step:08}/rank-{rank:05}.safetensors");
    let Ok(file) = fs::read(run.case.checkpoints().join(name)) else {
        // The run has deleted it, or fewer ranks have written it.
        return Ok(false);
    };
    let Some(weights) = some_weights(run, &file) else {
        return Ok(false);
    };
    // After restarts in place, it may be another rank that holds them.
    let Ok(pid) = run.some_rank().and_then(|rank| run.rank(rank)) else {
        return Ok(false);
    };
    let process = Pid::from_raw(pid);
    let stopped = kill(process, Signal::SIGSTOP);
    let flipped = stopped.map_err(|error| error.to_string());
    let flipped = flipped.and_then(|()| flip_in(run, pid, &weights));
    // It may have been killed.
    let _ = kill(process, Signal::SIGCONT);
    flipped
}

/// Consecutive weights of a file of a checkpoint, at a random place.
fn some_weights(run: &Restarted<'_>, file: &[u8]) -> Option<Vec<f32>> {
    let (len, rest) = file.split_first_chunk()?;
    let (header, values) = rest.split_at_checked(u64::from_le_bytes(*len) as usize)?;
    let header: BTreeMap<String, Value> = serde_json::from_slice(header).ok()?;
    let names: Vec<&String> = header
        .keys()
        .filter(|name| name.starts_with("model."))
        .collect();
    let name = names.get(run.case.below(names.len().max(1) as u64) as usize)?;
    let bound = |at: usize| header[*name]["data_offsets"][at].as_u64();
    let weights = numbers(values.get(bound(0)? as usize..bound(1)? as usize)?);
    let last = weights.len().checked_sub(NUM_WEIGHTS)?;
    let begin = run.case.below(last as u64 + 1) as usize;
    let found = weights[begin..begin + NUM_WEIGHTS].to_vec();
    let [least, most] = [f32::min, f32::max].map(|of| found.iter().copied().fold(found[0], of));
    (most - least > SPREAD).then_some(found)
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    let values = bytes.chunks_exact(4).map(|bytes| bytes.try_into().unwrap());
    values.map(f32::from_le_bytes).collect()
}

fn flip_in(run: &Restarted<'_>, pid: i32, weights: &[f32]) -> Result<bool, String> {
    let process = Path::new("/proc").join(pid.to_string());
    let maps = fs::read_to_string(process.join("maps")).map_err(|error| error.to_string())?;
    let memory = OpenOptions::new()
        .read(true)
        .write(true)
        .open(process.join("mem"))
        .map_err(|error| error.to_string())?;
    let found = maps.lines().filter_map(writable);
    let found = found.flat_map(|(begin, end)| places(&memory, begin, end, weights));
    let (same, changed): (Vec<_>, Vec<_>) = found.partition(|(_, is_same)| *is_same);
    // What has not changed may be a copy that a save is still writing.
    let found = if changed.is_empty() { same } else { changed };
    if found.is_empty() {
        return Ok(false);
    }
    let (begin, _) = run.case.one_of(&found);
    let at = begin + run.case.below(4 * NUM_WEIGHTS as u64);
    let mut byte = [0];
    let done = memory.read_exact_at(&mut byte, at).and_then(|()| {
        byte[0] ^= 1 << run.case.below(8);
        memory.write_all_at(&byte, at)
    });
    match done {
        Ok(()) => Ok(true),
        // A process that was killed meanwhile has no memory any more.
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
        Err(error) if error.raw_os_error() == Some(Errno::ESRCH as i32) => Ok(false),
        Err(error) => Err(error.to_string()),
    }
}

/// The addresses of a mapping of `/proc/PID/maps` that only this process reads and writes.
fn writable(line: &str) -> Option<(u64, u64)> {
    let (addresses, rest) = line.split_once(' ')?;
    let (begin, end) = addresses.split_once('-')?;
    let parsed = |text| u64::from_str_radix(text, 16).ok();
    rest.starts_with("rw-p").then_some(())?;
    Some((parsed(begin)?, parsed(end)?))
}

/// Where a mapping has numbers near these, and whether they are the same.
fn places(memory: &File, begin: u64, end: u64, weights: &[f32]) -> Vec<(u64, bool)> {
    let mut bytes = vec![0; (end - begin) as usize];
    // Some of the kernel's own cannot be read.
    if memory.read_exact_at(&mut bytes, begin).is_err() {
        return Vec::new();
    }
    let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= NEAR;
    let numbers = numbers(&bytes);
    let windows = numbers.windows(weights.len()).enumerate();
    let near = windows.filter(|(_, window)| window.iter().zip(weights).all(is_near));
    near.map(|(at, window)| (begin + 4 * at as u64, window == weights))
        .collect()
}
