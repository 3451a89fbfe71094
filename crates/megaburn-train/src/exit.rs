use std::process::ExitCode;

/// How a run ended, as its exit code reports it to a script or a supervisor.
///
/// Other codes come from elsewhere: `train.stopped_exit_code` of a run that was stopped, 101 after
/// a panic outside a rank thread (a bug), and 128 + the signal's number if a signal ended the
/// process immediately ([`crate::signal`]). [`Exit::table`] lists all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Exit {
    /// 0: finished, or stopped on request after saving. Running the same command again continues a
    /// stopped run.
    Done,
    /// 1: failed while running, for instance because the disk is full.
    Failed,
    /// 2: the command line, the configuration, the data or the checkpoint cannot be used.
    /// Restarting without a change fails in the same way.
    BadInput,
    /// 3: the loss or the gradient was not finite, or too many consecutive steps were skipped. The
    /// weights are those before the step.
    NonFinite,
    /// 4: another rank died, hung, or ran a different collective. Restarting continues from the
    /// last checkpoint.
    PeerLost,
}

impl Exit {
    /// Every code, in order.
    pub const ALL: [Exit; 5] = [
        Exit::Done,
        Exit::Failed,
        Exit::BadInput,
        Exit::NonFinite,
        Exit::PeerLost,
    ];

    /// The number that the process exits with.
    pub fn code(self) -> u8 {
        match self {
            Exit::Done => 0,
            Exit::Failed => 1,
            Exit::BadInput => 2,
            Exit::NonFinite => 3,
            Exit::PeerLost => 4,
        }
    }

    /// The variant with this exit code, if any.
    pub fn of_code(code: i32) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|exit| i32::from(exit.code()) == code)
    }

    /// Every exit code of the commands with its meaning, as `docs/training.md` and `--help` list
    /// them.
    pub fn table() -> Vec<(String, &'static str)> {
        let own = Exit::ALL.map(|exit| (exit.code().to_string(), exit.meaning()));
        let others = OTHERS.map(|(codes, meaning)| (codes.to_string(), meaning));
        own.into_iter().chain(others).collect()
    }

    /// The [`table`](Self::table) for `--help`.
    pub fn help() -> String {
        let line = |(codes, meaning): (String, &str)| format!("\n  {codes}: {meaning}");
        format!(
            "Exit codes:{}",
            Self::table().into_iter().map(line).collect::<String>()
        )
    }

    /// The meaning of the code in one line.
    pub fn meaning(self) -> &'static str {
        match self {
            Exit::Done => {
                "done, or stopped on request after saving (train.stopped_exit_code changes the latter)"
            }
            Exit::Failed => "failed while running",
            Exit::BadInput => "bad input or configuration",
            Exit::NonFinite => {
                "the loss or the gradient was not finite, also when computed again, or the loss was a \
                spike (`train.on_spike = \"stop\"`, or `\"rollback\"` where it cannot return), or 100 \
                steps in a row were skipped (more while a loss scale falls); the weights are those of the step before. Or an update produced \
                weights that are not finite: they are not saved"
            }
            Exit::PeerLost => "another rank died, hung or disagreed",
        }
    }
}

/// The codes that are not an [`Exit`].
const OTHERS: [(&str, &str); 2] = [
    (
        "101",
        "a bug (a panic; inside a rank thread it is 1): please report it",
    ),
    (
        "129, 130, 138, 140, 143",
        "SIGHUP, SIGINT, SIGUSR1, SIGUSR2 or SIGTERM before training began, or a second signal a \
        second or more after the first: ended at once, without saving; for `convert`, and for \
        `checkpoint weights`, `average` and `reshard`, the first SIGINT or SIGTERM: nothing \
        half-written remains",
    ),
];

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_count_up_from_zero_and_each_has_a_meaning_of_its_own() {
        let codes: Vec<u8> = Exit::ALL.map(Exit::code).to_vec();
        assert_eq!(codes, [0, 1, 2, 3, 4]);
        let mut meanings = Exit::ALL.map(Exit::meaning).to_vec();
        meanings.sort_unstable();
        meanings.dedup();
        assert_eq!(meanings.len(), Exit::ALL.len());
    }

    #[test]
    fn the_page_on_training_and_help_have_all_codes() {
        let page = include_str!("../../../docs/training.md");
        let rows: Vec<String> = Exit::table()
            .into_iter()
            .map(|(codes, meaning)| format!("| {codes} | {meaning} |\n"))
            .collect();
        let table = format!("| exit code | meaning |\n|---|---|\n{}\n", rows.concat());
        assert!(
            page.contains(&table),
            "docs/training.md has another table than:\n{table}"
        );
        assert_eq!(Exit::help().lines().count(), 1 + rows.len());
    }

    #[test]
    fn a_process_exits_with_the_code() {
        assert_eq!(
            format!("{:?}", ExitCode::from(Exit::NonFinite)),
            format!("{:?}", ExitCode::from(3))
        );
    }
}
