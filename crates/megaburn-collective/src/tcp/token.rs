//! What distinguishes the processes of one job from all others that reach its ports.

use std::{fmt, io};

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

/// The job's token. Every process of a job has the same token and sends it in its first message; a
/// process with another token is refused.
///
/// It is sent in clear text: anyone who can read the network between the hosts can read it.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobToken {
    text: String,
    #[serde(skip)]
    is_secret: bool,
}

impl JobToken {
    /// The environment variable that holds it.
    pub const VARIABLE: &str = "MEGABURN_JOB_TOKEN";

    /// A token that only the processes of the job know. A process that knows it but contradicts the
    /// others, e.g. in the number of ranks, was started wrongly and ends the job.
    pub fn secret(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            is_secret: true,
        }
    }

    /// A token made from public information, such as a scheduler's job id.
    pub fn public(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            is_secret: false,
        }
    }

    /// Draws a new token that cannot be guessed.
    ///
    /// # Errors
    /// The system provides no random numbers.
    pub fn draw() -> io::Result<Self> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Self::secret(
            bytes.map(|byte| format!("{byte:02x}")).concat(),
        ))
    }

    /// The token as text, for the environment of a process of the job.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether only the processes of the job know it.
    pub fn is_secret(&self) -> bool {
        self.is_secret
    }

    /// Returns the token of one attempt of a job that is started again after a failure, so that a
    /// process of another attempt cannot join it. Attempt 0 uses the job's own token.
    pub fn of_attempt(&self, attempt: usize) -> Self {
        match attempt {
            0 => self.clone(),
            _ => Self {
                text: format!("{}/{attempt}", self.text),
                is_secret: self.is_secret,
            },
        }
    }

    /// Whether both tokens are equal, compared in constant time.
    pub fn agrees(&self, other: &Self) -> bool {
        self.text.as_bytes().ct_eq(other.text.as_bytes()).into()
    }

    /// The token of this process's environment: [`Self::VARIABLE`], else the job id of torchrun or
    /// Slurm, else the empty token that all jobs without a token share.
    pub fn from_env() -> Self {
        Self::from_lookup(|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    /// Reads the token from the environment: [`Self::VARIABLE`], else the job id of torchrun or
    /// Slurm (including the step, because Slurm may run several steps of a job at once), else the
    /// empty token that all jobs without a token share.
    pub(super) fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        if let Some(text) = get(Self::VARIABLE) {
            return Self::secret(text);
        }
        if let Some(id) = get("TORCHELASTIC_RUN_ID") {
            let restarts = get("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
            return Self::public(format!("{id}/{restarts}"));
        }
        let step = get("SLURM_STEP_ID")
            .map(|step| format!(".{step}"))
            .unwrap_or_default();
        let slurm = get("SLURM_JOB_ID").map(|id| Self::public(format!("slurm {id}{step}")));
        slurm.unwrap_or_default()
    }
}

impl fmt::Debug for JobToken {
    /// Hides the token itself, which must not appear in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.text.is_empty() {
            "JobToken(none)"
        } else {
            "JobToken(..)"
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_drawn_anew_and_never_printed() {
        let one = JobToken::draw().unwrap();
        let other = JobToken::draw().unwrap();
        assert_eq!(one.text().len(), 32);
        assert!(
            one.agrees(&one.clone()) && !one.agrees(&other) && !one.agrees(&JobToken::default())
        );
        assert!(!format!("{one:?}").contains(one.text()));
    }

    #[test]
    fn the_variable_comes_before_what_launchers_call_the_job() {
        let read = |set: &[(&str, &str)]| {
            let find = |name: &str| set.iter().find(|(known, _)| *known == name);
            JobToken::from_lookup(|name| find(name).map(|(_, value)| value.to_string()))
        };
        let all = [
            ("MEGABURN_JOB_TOKEN", "s3cret"),
            ("TORCHELASTIC_RUN_ID", "r7"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
            ("SLURM_JOB_ID", "41"),
        ];
        let expected = [
            ("s3cret", true),
            ("r7/2", false),
            ("r7/2", false),
            ("slurm 41", false),
        ];
        for (from, (text, is_secret)) in expected.into_iter().enumerate().filter(|(i, _)| *i != 2) {
            let token = read(&all[from..]);
            assert_eq!((token.text(), token.is_secret()), (text, is_secret));
        }
        let steps = ["0", "1"].map(|id| read(&[("SLURM_JOB_ID", "41"), ("SLURM_STEP_ID", id)]));
        assert_eq!(
            [steps[0].text(), steps[1].text()],
            ["slurm 41.0", "slurm 41.1"]
        );
        assert_eq!(read(&[("MEGABURN_JOB_TOKEN", "")]), JobToken::default());
    }
}
