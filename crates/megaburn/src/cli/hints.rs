//! Hints for command lines that are wrong in a usual way.

use clap::{
    Error,
    builder::StyledStr,
    error::{ContextKind, ContextValue, ErrorKind},
};

/// The error with a hint, where there is one.
pub(super) fn with_hint(mut error: Error) -> Error {
    let usage = error.get(ContextKind::Usage).map(ToString::to_string).unwrap_or_default();
    let Some(ContextValue::String(found)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    if error.kind() == ErrorKind::UnknownArgument
        && usage.contains(" launch ")
        && !found.starts_with('-')
    {
        let hint = format!("put `--` before the command: megaburn launch ... -- {found} ...");
        let hint = ContextValue::StyledStrs(vec![StyledStr::from(hint)]);
        error.insert(ContextKind::Suggested, hint);
    }
    error
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::Cli;

    fn message(args: &[&str]) -> String {
        let args = [&["megaburn"], args].concat();
        let error = Cli::try_parse_from(args).err().expect("the command line is wrong");
        with_hint(error).to_string()
    }

    #[test]
    fn a_command_without_dashes_before_it_gets_a_hint() {
        let hint = "put `--` before the command: megaburn launch ... -- megaburn ...";
        let found = message(&["launch", "--nproc", "2", "megaburn", "train"]);
        assert!(found.contains(hint), "{found}");
        for other in [&["launch", "--nprocs", "2"][..], &["train", "here"]] {
            let found = message(other);
            assert!(!found.contains("put `--`"), "{found}");
        }
    }
}
