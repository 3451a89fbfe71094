//! `megaburn man`: manual pages of all commands.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use clap::Args;
use clap_mangen::Man;
use megaburn_train::TrainError;

use super::print;

#[derive(Args)]
pub(super) struct ManArgs {
    /// The folder, which is created; `man -M` and MANPATH look for pages in its subfolder `man1`.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

impl ManArgs {
    /// Writes a page of `command`, and one of each of its subcommands.
    ///
    /// # Errors
    /// A page cannot be written.
    pub(super) fn run(self, mut command: clap::Command) -> Result<(), TrainError> {
        let dir = self.dir.join("man1");
        let fail = |path: &Path, source| TrainError::Write {
            path: path.into(),
            source,
        };
        fs::create_dir_all(&dir).map_err(|source| fail(&dir, source))?;
        // With the flags that every command has, such as --help.
        command.build();
        let mut pages = Vec::new();
        collect(&command, String::new(), &mut pages);
        let count = pages.len();
        for (name, command) in pages {
            let path = dir.join(format!("{name}.1"));
            write(&path, &name, command).map_err(|source| fail(&path, source))?;
        }
        print::note(format!("wrote    {count} pages into {}", dir.display()));
        Ok(())
    }
}

/// A command and all below it that are shown, with the names of their pages.
fn collect(command: &clap::Command, parent: String, pages: &mut Vec<(String, clap::Command)>) {
    let name = match parent.is_empty() {
        true => command.get_name().to_string(),
        false => format!("{parent}-{}", command.get_name()),
    };
    pages.push((name.clone(), command.clone()));
    let shown = command
        .get_subcommands()
        .filter(|below| !below.is_hide_set() && below.get_name() != "help");
    for below in shown {
        collect(below, name.clone(), pages);
    }
}

fn write(path: &Path, name: &str, command: clap::Command) -> io::Result<()> {
    let mut page = Vec::new();
    Man::new(command).title(name).render(&mut page)?;
    fs::File::create(path)?.write_all(&page)
}
