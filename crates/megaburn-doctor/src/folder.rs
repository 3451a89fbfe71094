//! Whether all ranks can use one folder: each writes a file, and looks for the files of others.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use megaburn_collective::{CollectiveError, Group, objects};
use nix::sys::statvfs::statvfs;

use crate::facts::FolderFacts;

/// A network file system may show a file late.
const PATIENCE: Duration = Duration::from_secs(5);
/// The bytes of each rank's file.
const BYTES: usize = 1 << 20;

/// Examines `folder`, or the nearest folder above it that exists, as a run would make the others.
/// The files that the ranks write are in a folder of their own, which is removed.
///
/// # Errors
/// See [`CollectiveError`]; that the folder cannot be used is no error.
/// # Collective
/// All ranks.
pub(crate) fn examine(world: &Group, folder: &Path) -> Result<FolderFacts, CollectiveError> {
    let mine = existing(folder);
    let mut facts = FolderFacts {
        path: mine.display().to_string(),
        free_bytes: free_bytes(&mine),
        ..FolderFacts::default()
    };
    // Rank 0 makes the folder, and every rank looks for it under its own path.
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let unique = since.map_or(0, |since| since.as_nanos());
    let name = format!(".megaburn-doctor-{}-{unique}", std::process::id());
    let name = objects::broadcast(world, &name)?;
    let place = mine.join(name);
    let made = match world.rank() {
        0 => fs::create_dir(&place).map_err(|error| in_words("make a folder in", &mine, &error)),
        _ => Ok(()),
    };
    let is_made = objects::broadcast(world, &made.is_ok())?;
    if !is_made {
        facts.error = made.err();
        return Ok(facts);
    }
    let is_there = seen(&place);
    if is_there {
        match write(&place, world.rank()) {
            Ok(seconds) => facts.write_seconds = Some(seconds),
            Err(error) => facts.error = Some(in_words("write into", &mine, &error)),
        }
    }
    // The ranks that wrote a file.
    let wrote = objects::gather(world, &facts.write_seconds.is_some())?;
    let wrote = objects::broadcast(world, &wrote)?;
    // Rank 0 looks for all files; the others for that of rank 0 and of the next rank.
    let (rank, size) = (world.rank(), world.size());
    let others: Vec<usize> = match rank {
        0 => (1..size).collect(),
        _ => [0, (rank + 1) % size].into(),
    };
    let mut looked_for: Vec<usize> = others.into_iter().filter(|other| *other != rank).collect();
    looked_for.dedup();
    let is_missing = |other: &usize| {
        let is_written = wrote.get(*other).copied().unwrap_or(false);
        is_written && !has_file_of(&place, *other)
    };
    facts.unseen = match is_there {
        true => looked_for.into_iter().filter(is_missing).collect(),
        // The folder of rank 0 is not this one.
        false => vec![0],
    };
    world.barrier()?;
    let _ = fs::remove_file(file_of(&place, rank));
    world.barrier()?;
    if rank == 0 {
        // What another rank could not remove stays, with the folder.
        let _ = fs::remove_dir(&place);
    }
    Ok(facts)
}

/// The nearest of a folder and those above it that exists.
fn existing(folder: &Path) -> PathBuf {
    let found = folder
        .ancestors()
        .find(|folder| folder.as_os_str().is_empty() || folder.exists());
    match found {
        Some(folder) if !folder.as_os_str().is_empty() => folder.into(),
        _ => PathBuf::from("."),
    }
}

/// The bytes that a user without privileges can write.
fn free_bytes(folder: &Path) -> Option<u64> {
    let found = statvfs(folder).ok()?;
    Some(found.blocks_available() * found.fragment_size())
}

/// Whether a path appears within the patience.
fn seen(path: &Path) -> bool {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if path.exists() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(50));
    }
}

fn file_of(place: &Path, rank: usize) -> PathBuf {
    place.join(format!("rank-{rank}"))
}

/// The contents of a rank's file, which differ from those of other ranks.
fn contents(rank: usize) -> Vec<u8> {
    let number = (rank as u64).to_le_bytes();
    number.into_iter().cycle().take(BYTES).collect()
}

/// Writes a rank's file as checkpoints are written: under another name, synced, renamed, and the
/// folder synced. Returns the seconds.
fn write(place: &Path, rank: usize) -> io::Result<f64> {
    let start = Instant::now();
    let unfinished = place.join(format!("rank-{rank}.unfinished"));
    let result = (|| {
        let mut file = File::create_new(&unfinished)?;
        file.write_all(&contents(rank))?;
        file.sync_all()?;
        fs::rename(&unfinished, file_of(place, rank))?;
        File::open(place)?.sync_all()
    })();
    if result.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    result.map(|()| start.elapsed().as_secs_f64())
}

fn has_file_of(place: &Path, rank: usize) -> bool {
    let file = file_of(place, rank);
    seen(&file) && fs::read(&file).is_ok_and(|found| found == contents(rank))
}

fn in_words(what: &str, folder: &Path, error: &io::Error) -> String {
    format!("cannot {what} {}: {error}", folder.display())
}
