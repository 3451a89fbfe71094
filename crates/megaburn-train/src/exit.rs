use std::process::ExitCode;

/// How a run ended, as its exit code tells a script or a supervisor.
///
/// Two codes come from elsewhere: 101 after a panic outside a rank thread (a bug), and 128 + the
/// signal's number when a later SIGINT (130) or SIGTERM (143) ended the process at once
/// ([`crate::signal`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Exit {
    /// 0: finished, or stopped by a signal after saving. Starting the same command again continues
    /// a stopped run.
    Done,
    /// 1: failed while running, for instance because the disk is full.
    Failed,
    /// 2: the command line, the configuration, the data or the checkpoint cannot be used. Starting
    /// again without a change fails again.
    BadInput,
    /// 3: the loss or the gradient was not finite, or too many steps in a row were skipped. The
    /// weights are those of the step before.
    NonFinite,
    /// 4: another rank died, hung, or ran another collective than this one. Starting again
    /// continues from the last checkpoint.
    PeerLost,
}

impl Exit {
    /// Every code, in order.
    pub const ALL: [Exit; 5] =
        [Exit::Done, Exit::Failed, Exit::BadInput, Exit::NonFinite, Exit::PeerLost];

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

    /// The meaning of an exit code of megaburn's.
    pub fn of_code(code: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|exit| i32::from(exit.code()) == code)
    }

    /// One line for `--help` and the README.
    pub fn meaning(self) -> &'static str {
        match self {
            Exit::Done => "done, or stopped by a signal after saving",
            Exit::Failed => "failed while running",
            Exit::BadInput => "bad input or configuration",
            Exit::NonFinite => "the loss or the gradient was not finite (weights untouched)",
            Exit::PeerLost => "another rank died, hung or disagreed",
        }
    }
}

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
    fn a_process_exits_with_the_code() {
        assert_eq!(
            format!("{:?}", ExitCode::from(Exit::NonFinite)),
            format!("{:?}", ExitCode::from(3))
        );
    }
}
