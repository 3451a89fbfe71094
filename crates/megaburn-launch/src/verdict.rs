//! Decides which of several failures came first.

use std::{fmt, process::ExitStatus};

use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use crate::{EXIT_PEER_FAILED, child};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum EndedBy {
    /// It exited with this code.
    Code(i32),
    /// This signal killed it.
    Signal(i32),
    /// It did not end although it was killed, so the launcher abandoned this process.
    Nothing {
        /// Its process id.
        pid: i32,
    },
    /// Its host was lost, so it is not known how it ended.
    LostHost,
    /// It has not ended: another rank failed, and it waits for a restart in place.
    LostPeer,
}

impl EndedBy {
    pub(crate) fn of(status: ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt;
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or_default()),
        }
    }

    fn failed(self) -> bool {
        self != Self::Code(0)
    }

    /// Whether the rank only noticed the failure of another one.
    pub(crate) fn is_echo(self) -> bool {
        matches!(self, Self::Code(EXIT_PEER_FAILED) | Self::LostPeer)
    }
}

/// The exit code of ranks that stopped on purpose: all of them ended with this code, and it is not
/// a failure code of megaburn, of Rust or of shells. `train.stopped_exit_code` is limited to such
/// codes.
pub(crate) fn exit_code_of_signal(mut ends: impl Iterator<Item = EndedBy>) -> Option<i32> {
    let first = ends.next()?;
    match first {
        EndedBy::Code(code) if code > EXIT_PEER_FAILED && code < 126 && code != 101 => {
            ends.all(|by| by == first).then_some(code)
        }
        _ => None,
    }
}

impl fmt::Display for EndedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(number) => match Signal::try_from(number) {
                Ok(signal) => write!(f, "was killed by {signal}"),
                Err(_) => write!(f, "was killed by signal {number}"),
            },
            Self::Nothing { pid } => write!(
                f,
                "did not exit after it was killed: process {pid} is still running, held in the \
                kernel by a disk, a network file system or a GPU that does not answer"
            ),
            Self::LostHost => f.write_str("was lost with its host"),
            Self::LostPeer => f.write_str("lost another rank"),
        }
    }
}

/// How a rank ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankEnd {
    /// The rank's number.
    pub rank: usize,
    /// How its process ended.
    pub by: EndedBy,
    /// Whether the launcher had already signalled it to end.
    pub told: bool,
    /// The last lines it wrote to standard error.
    pub last_words: Vec<String>,
}

/// How a run ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// The ranks of this host, in the order in which they ended.
    pub ends: Vec<RankEnd>,
    /// The signal that the launcher received and forwarded, if any.
    pub signal: Option<i32>,
}

impl Outcome {
    /// The rank that failed first, if any. A rank that was only notified of another's failure (exit
    /// code 4, or ended by the launcher) is named only if there is no better candidate.
    pub fn cause(&self) -> Option<&RankEnd> {
        let failed = || self.ends.iter().filter(|end| end.by.failed());
        let own = || failed().filter(|end| !end.by.is_echo());
        // SIGTERM either kills a program or makes it exit with code 128 + 15.
        let by_sigterm = EndedBy::Code(128 + Signal::SIGTERM as i32);
        let told_to = |end: &&RankEnd| {
            end.told && (!matches!(end.by, EndedBy::Code(_)) || end.by == by_sigterm)
        };
        own()
            .find(|end| !end.told)
            .or_else(|| own().find(|end| !told_to(end)))
            .or_else(|| failed().find(|end| !end.told))
            .or_else(|| own().next())
            .or_else(|| failed().next())
    }

    /// The [cause](Self::cause) in one line, such as `rank 3 was killed by SIGKILL`, after the rank that
    /// hung if that is to blame. `host_of` names the host of a rank, where there are several.
    pub(crate) fn reason(&self, host_of: impl Fn(usize) -> Option<String>) -> Option<String> {
        let cause = self.cause()?;
        let RankEnd { rank, by, .. } = cause;
        let (mut reason, blamed) = match self.culprit().filter(|culprit| culprit != rank) {
            Some(hung) => {
                let reason = format!("rank {hung} hung and was killed; rank {rank} {by}");
                (reason, hung)
            }
            None => (format!("rank {rank} {by}"), *rank),
        };
        // The last words of a lost host name it.
        let host = match by {
            EndedBy::LostHost => cause.last_words.first().map(|host| format!(", {host}")),
            _ => host_of(blamed).map(|host| format!(" on {host}")),
        };
        reason.extend(host);
        Some(reason)
    }

    /// Whether the ranks failed, rather than finished or stopped on purpose.
    pub(crate) fn is_failure(&self) -> bool {
        let ends = self.ends.iter().map(|end| end.by);
        self.signal.is_none() && self.cause().is_some() && exit_code_of_signal(ends).is_none()
    }

    /// The process of a rank that still runs although it was killed, and holds what it uses.
    pub(crate) fn held(&self) -> Option<i32> {
        self.ends.iter().find_map(|end| match end.by {
            EndedBy::Nothing { pid } => Some(pid),
            _ => None,
        })
    }

    /// The rank that is to blame: the first one that failed or, if that one only lost a peer, a rank that
    /// hung and was killed. `None` if no rank is more to blame than others.
    pub(crate) fn culprit(&self) -> Option<usize> {
        let cause = self.cause()?;
        if !cause.by.is_echo() && !cause.told {
            return Some(cause.rank);
        }
        let killed = EndedBy::Signal(Signal::SIGKILL as i32);
        let hung = self.ends.iter().find(|end| end.told && end.by == killed);
        hung.map(|end| end.rank)
    }

    /// Why another start of the ranks would not help; `None` if it may.
    pub(crate) fn obstacle(&self) -> Option<String> {
        match self.cause()?.by {
            EndedBy::Code(2) => {
                Some("exit code 2 means that the input or the configuration is wrong".into())
            }
            EndedBy::Code(3) => Some(
                "exit code 3 means that numbers are not finite, also when computed again, or that \
                the loss is a spike; another start would compute the same"
                    .into(),
            ),
            EndedBy::Code(code @ (child::EXIT_CANNOT_START | child::EXIT_NOT_FOUND)) => Some(
                format!("exit code {code} means that the command cannot be started"),
            ),
            _ => None,
        }
    }

    /// The launcher's exit code: the cause's own code, 128 plus the signal number if a signal
    /// killed it (SIGKILL's number for a rank that does not end), or 0 if every rank succeeded.
    pub fn exit_code(&self) -> i32 {
        match self.cause().map(|end| end.by) {
            None => 0,
            Some(EndedBy::Code(code)) => code,
            Some(EndedBy::Signal(number)) => 128 + number,
            Some(EndedBy::LostHost) => 1,
            Some(EndedBy::LostPeer) => EXIT_PEER_FAILED,
            Some(EndedBy::Nothing { .. }) => 128 + Signal::SIGKILL as i32,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let signal = self.signal.and_then(|number| Signal::try_from(number).ok());
        if let Some(code) = exit_code_of_signal(self.ends.iter().map(|end| end.by)) {
            f.write_str("stopped")?;
            signal
                .iter()
                .try_for_each(|signal| write!(f, " by {signal}"))?;
            return write!(f, "; every rank exited with code {code}");
        }
        let Some(RankEnd {
            rank,
            by,
            last_words,
            ..
        }) = self.cause()
        else {
            return match signal {
                Some(signal) => write!(f, "stopped by {signal}; every rank exited with code 0"),
                None => f.write_str("every rank exited with code 0"),
            };
        };
        if let Some(signal) = signal {
            write!(f, "stopped by {signal}; ")?;
        }
        write!(f, "rank {rank} {by}")?;
        if !last_words.is_empty() {
            f.write_str("; its last lines on standard error:")?;
        }
        last_words
            .iter()
            .try_for_each(|line| write!(f, "\n  {line}"))?;
        let left = |end: &&RankEnd| matches!(end.by, EndedBy::Nothing { .. }) && end.rank != *rank;
        let mut left = self.ends.iter().filter(left);
        left.try_for_each(|end| write!(f, "\nrank {} {}", end.rank, end.by))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::{EndedBy::*, *};

    fn outcome(ends: &[(EndedBy, bool)]) -> Outcome {
        let end = |(rank, &(by, told))| RankEnd {
            rank,
            by,
            told,
            last_words: Vec::new(),
        };
        Outcome {
            ends: ends.iter().enumerate().map(end).collect(),
            signal: None,
        }
    }

    #[rstest]
    #[case::success(&[(Code(0), false), (Code(0), false)], None, 0)]
    #[case::first_in_time(&[(Code(2), false), (Code(1), false)], Some(0), 2)]
    #[case::killed(&[(Signal(9), false), (Code(4), false), (Code(4), true)], Some(0), 137)]
    #[case::echo_exits_first(&[(Code(4), false), (Code(3), false)], Some(1), 3)]
    #[case::culprit_exits_late(&[(Code(4), false), (Signal(15), true), (Code(1), true)], Some(2), 1)]
    #[case::only_echoes(&[(Code(0), false), (Code(4), false), (Signal(9), true)], Some(1), 4)]
    #[case::held_by_the_kernel(&[(Code(1), false), (Nothing { pid: 7 }, true)], Some(0), 1)]
    #[case::held_alone(&[(Code(0), false), (Nothing { pid: 7 }, true)], Some(1), 137)]
    #[case::hung_exits_when_told(&[(Code(4), false), (Code(143), true)], Some(0), 4)]
    #[case::waits_for_a_restart(&[(LostPeer, false), (Signal(9), false)], Some(1), 137)]
    #[case::all_wait_for_a_restart(&[(LostPeer, false), (LostPeer, false)], Some(0), 4)]
    #[case::all_told_while_they_wait(&[(Code(4), true), (Code(143), true)], Some(1), 143)]
    #[case::signal_after_all_told(&[(Signal(15), true), (Signal(15), true)], Some(0), 143)]
    fn the_first_own_failure_is_the_cause(
        #[case] ends: &[(EndedBy, bool)],
        #[case] cause: Option<usize>,
        #[case] code: i32,
    ) {
        let outcome = outcome(ends);
        assert_eq!(
            (outcome.cause().map(|end| end.rank), outcome.exit_code()),
            (cause, code)
        );
    }

    #[rstest]
    #[case::killed(&[(Signal(9), false), (Code(4), false)], true, None)]
    #[case::non_finite(&[(Code(3), false)], true, Some("not finite"))]
    #[case::success(&[(Code(0), false); 2], false, None)]
    #[case::stopped(&[(Code(75), false); 2], false, None)]
    #[case::wrong(&[(Code(4), false), (Code(2), false)], true, Some("configuration"))]
    #[case::no_command(&[(Code(127), false)], true, Some("cannot be started"))]
    #[case::lost(&[(Code(4), false), (LostHost, false)], true, None)]
    #[case::lost_peer(&[(LostPeer, false), (LostPeer, false)], true, None)]
    fn only_a_failure_that_may_pass_is_followed_by_a_restart(
        #[case] ends: &[(EndedBy, bool)],
        #[case] is_failure: bool,
        #[case] obstacle: Option<&str>,
    ) {
        let mut outcome = outcome(ends);
        assert_eq!(outcome.is_failure(), is_failure);
        if is_failure {
            let why = outcome.obstacle();
            assert_eq!(why.is_some(), obstacle.is_some(), "{why:?}");
            assert!(
                why.unwrap_or_default()
                    .contains(obstacle.unwrap_or_default())
            );
        }
        outcome.signal = Some(15);
        assert!(!outcome.is_failure());
    }

    #[rstest]
    #[case::own(&[(Code(4), false), (Code(1), false)], Some(1))]
    #[case::hung(&[(Code(4), false), (Signal(9), true), (Code(4), false)], Some(1))]
    #[case::hung_in_place(&[(LostPeer, false), (Signal(9), true)], Some(1))]
    #[case::all_lost_a_peer(&[(Code(4), false), (Code(4), false)], None)]
    #[case::lost(&[(Code(4), false), (LostHost, false)], Some(1))]
    fn a_host_is_blamed_for_its_own_failure_or_its_hang(
        #[case] ends: &[(EndedBy, bool)],
        #[case] rank: Option<usize>,
    ) {
        assert_eq!(outcome(ends).culprit(), rank);
    }

    #[test]
    fn the_reason_names_a_rank_that_hung() {
        let hung = outcome(&[(Code(4), false), (Signal(9), true), (Code(4), false)]);
        let reason = "rank 1 hung and was killed; rank 0 exited with code 4";
        assert_eq!(hung.reason(|_| None).unwrap(), reason);
        assert_eq!(outcome(&[(Code(0), false)]).reason(|_| None), None);
    }

    #[test]
    fn ranks_that_agree_on_a_code_that_is_no_failure_have_stopped() {
        let mut stopped = outcome(&[(Code(75), false), (Code(75), false)]);
        stopped.ends[0].last_words = vec!["a warning".into()];
        assert_eq!(
            stopped.to_string(),
            "stopped; every rank exited with code 75"
        );
        assert_eq!(stopped.exit_code(), 75);
        stopped.signal = Some(15);
        assert_eq!(
            stopped.to_string(),
            "stopped by SIGTERM; every rank exited with code 75"
        );
        for failed in [
            &[(Code(75), false), (Code(1), false)][..],
            &[(Code(2), false); 2],
        ] {
            assert!(
                outcome(failed).to_string().contains("exited with code"),
                "{failed:?}"
            );
            assert!(!outcome(failed).to_string().contains("every"), "{failed:?}");
        }
    }

    #[test]
    fn the_cause_is_told_with_its_last_words() {
        let mut outcome = outcome(&[(Code(0), false), (Signal(9), false)]);
        outcome.ends[1].last_words = vec!["step 7".into()];
        let text = outcome.to_string();
        assert_eq!(
            text,
            "rank 1 was killed by SIGKILL; its last lines on standard error:\n  step 7"
        );
        let reason = "rank 1 was killed by SIGKILL";
        assert_eq!(outcome.reason(|_| None).unwrap(), reason);
        let on_host = outcome.reason(|rank| Some(format!("node {rank}")));
        assert_eq!(on_host.unwrap(), format!("{reason} on node 1"));
    }
}
