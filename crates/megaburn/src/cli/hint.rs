//! Suggests what to write instead of an unknown flag.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use megaburn_train::config::setting_of_flag;

/// Adds a hint to the error about an unknown flag of a training run if it names a setting: `--lr`
/// is `--set optimizer.lr=...`.
pub fn with_setting(error: clap::Error) -> clap::Error {
    let Some(flag) = unknown(&error).filter(|flag| flag.starts_with("--")) else {
        return error;
    };
    match setting_of_flag(flag.trim_start_matches('-')) {
        Some(key) => suggesting(error, format!("it is a setting: `--set {key}=VALUE`")),
        None => error,
    }
}

/// Adds a hint to the launcher's usage error: `--` must precede the program.
pub(super) fn with_program(error: clap::Error) -> clap::Error {
    match unknown(&error).filter(|word| !word.starts_with('-')) {
        Some(program) => {
            let hint = format!("write `--` before the program: `-- {program} ...`");
            suggesting(error, hint)
        }
        None => error,
    }
}

/// The unknown argument of a usage error.
fn unknown(error: &clap::Error) -> Option<String> {
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word)) if error.kind() == ErrorKind::UnknownArgument => {
            Some(word.clone())
        }
        _ => None,
    }
}

fn suggesting(mut error: clap::Error, hint: String) -> clap::Error {
    error.remove(ContextKind::SuggestedArg);
    error.insert(
        ContextKind::Suggested,
        ContextValue::StyledStrs(vec![hint.into()]),
    );
    error
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::super::parse;

    #[rstest]
    #[case("train --lr 1e-3", "it is a setting: `--set optimizer.lr=VALUE`")]
    #[case(
        "train --batch-size 8",
        "it is a setting: `--set train.global_batch=VALUE`"
    )]
    #[case("train --seq_len=64", "it is a setting: `--set data.seq_len=VALUE`")]
    #[case("train --layuot tp1", "a similar argument exists: '--layout'")]
    #[case(
        "launch --nproc 2 megaburn train",
        "write `--` before the program: `-- megaburn ...`"
    )]
    fn an_unknown_flag_is_answered_with_what_was_meant(#[case] line: &str, #[case] hint: &str) {
        let words = std::iter::once("megaburn").chain(line.split(' '));
        let Err(error) = parse(words.map(Into::into).collect()) else {
            panic!("{line} is read")
        };
        let error = error.to_string();
        assert!(error.contains(hint), "{error}");
        assert_eq!(error.matches("tip:").count(), 1, "{error}");
    }
}
