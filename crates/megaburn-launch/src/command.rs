//! Checks that the command exists before it is started for each rank.

use std::{
    env,
    ffi::OsStr,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use crate::error::LaunchError;

/// Refuses a command that cannot be executed.
///
/// # Errors
/// The program does not exist or is not executable.
pub(crate) fn check(program: &OsStr) -> Result<(), LaunchError> {
    find(program, env::var_os("PATH").as_deref())
}

fn find(program: &OsStr, path: Option<&OsStr>) -> Result<(), LaunchError> {
    let name = program.display().to_string();
    let candidates: Vec<PathBuf> = match Path::new(program).components().count() {
        1 if !name.contains('/') => match path {
            Some(path) => env::split_paths(path)
                .map(|folder| folder.join(program))
                .collect(),
            // Without `PATH`, the system uses its own default.
            None => return Ok(()),
        },
        _ => vec![program.into()],
    };
    let found: Vec<_> = candidates
        .iter()
        .filter_map(|file| fs::metadata(file).ok())
        .collect();
    if found
        .iter()
        .any(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    {
        return Ok(());
    }
    match (found.is_empty(), name.contains('/')) {
        (false, _) => Err(LaunchError::NotExecutable { name }),
        (true, true) => Err(LaunchError::NoCommand {
            why: format!("no such file: `{name}`"),
        }),
        (true, false) => {
            let here = if Path::new(program).exists() {
                format!("; did you mean `./{name}`?")
            } else {
                String::new()
            };
            Err(LaunchError::NoCommand {
                why: format!("`{name}` was not found in PATH{here}"),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_found_as_the_system_finds_it() {
        let path = OsStr::new("/nowhere:/bin:/usr/bin");
        let find = |program: &str| find(OsStr::new(program), Some(path));
        assert!(find("sh").is_ok() && find("/bin/sh").is_ok());
        let message = |program| find(program).unwrap_err().to_string();
        assert!(message("no-such-program").contains("`no-such-program` was not found in PATH"));
        assert!(message("Cargo.toml").contains("did you mean `./Cargo.toml`?"));
        assert!(message("./nothing/here").contains("no such file: `./nothing/here`"));
        let codes = ["./Cargo.toml", "/bin", "./nothing"].map(|name| find(name).unwrap_err());
        assert_eq!(codes.map(|error| error.exit_code()), [126, 126, 127]);
    }
}
