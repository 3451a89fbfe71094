//! Log files with the output of each rank, one file per rank.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use crate::queue::{Output, OutputQueue};

/// Lines that may wait for the disk.
const WAITING: usize = 4096;
/// How long a writing rank is blocked by a disk that does not answer; after that, lines are
/// dropped.
const SLOW_DISK: Duration = Duration::from_secs(10);

/// The log files, which one thread writes.
#[derive(Clone, Debug)]
pub(crate) struct Logs(OutputQueue<(usize, Vec<u8>)>);

impl Logs {
    /// Creates the folder `dir` and opens `rank-N.log` in it for each rank of `ranks`. New lines
    /// are appended to existing files. Later errors are reported through `errors`, once per file.
    pub(crate) fn open(
        dir: &Path,
        ranks: std::ops::Range<usize>,
        errors: OutputQueue<Vec<u8>>,
    ) -> io::Result<Self> {
        let in_file = |path: &Path, error: io::Error| {
            io::Error::new(error.kind(), format!("`{}`: {error}", path.display()))
        };
        fs::create_dir_all(dir).map_err(|error| in_file(dir, error))?;
        let mut files: Vec<(PathBuf, Option<File>)> = Vec::new();
        for rank in ranks {
            let path = dir.join(format!("rank-{rank}.log"));
            let file = File::options().create(true).append(true).open(&path);
            files.push((
                path.clone(),
                Some(file.map_err(|error| in_file(&path, error))?),
            ));
        }
        let write = move |output: Output<(usize, Vec<u8>)>| match output {
            Output::Item((local_rank, line)) => {
                let (path, file) = &mut files[local_rank];
                if let Some(Err(error)) = file.as_mut().map(|file| file.write_all(&line)) {
                    *file = None;
                    let path = path.display();
                    errors.push(
                        format!(
                            "megaburn launch: cannot write `{path}`: {error}; the log ends \
                                here\n"
                        )
                        .into_bytes(),
                    );
                }
            }
            Output::Dropped(lines) => errors.push(
                format!(
                    "megaburn launch: the disk is slow: {lines} lines were dropped from the \
                    logs\n"
                )
                .into_bytes(),
            ),
        };
        Ok(Self(OutputQueue::spawn("logs", WAITING, write)?))
    }

    /// Writes a line of a rank, given its number on this host.
    pub(crate) fn write(&self, local_rank: usize, line: Vec<u8>) {
        self.0.push_within((local_rank, line), SLOW_DISK);
    }

    /// Waits until everything is written; gives up when nothing was written for `patience`.
    pub(crate) fn flush(&self, patience: Duration) {
        self.0.flush(patience);
    }
}
