//! Checks whether a caller at rank 0's port is a rank of the job.

use super::{
    RankEnv, build,
    wire::{Hello, StartFailure, VERSION},
};

/// Why a caller is refused.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) why: String,
    /// Whether the caller certainly belongs to this job, so that the job cannot continue after its
    /// mistake. No other caller ends the job at once.
    pub(super) ends_all: bool,
    /// The rank that a caller claims to be, in this job or in another one that looks like it. If
    /// that rank is missing, the right process has the time of a collective to arrive.
    pub(super) rank: Option<usize>,
    /// Why that rank cannot start, if the caller came to report that.
    pub(super) failure: Option<StartFailure>,
}

impl Refusal {
    pub(super) fn of_stranger(why: String) -> Self {
        Self {
            why,
            ends_all: false,
            rank: None,
            failure: None,
        }
    }

    /// Builds the refusal of a caller that made a mistake. A caller that knows a secret token
    /// belongs to this job. A caller whose rank or world size does not exist in this job is none of
    /// its ranks.
    fn of_mistake(why: String, hello: &Hello, env: &RankEnv) -> Self {
        let is_like_ours = hello.world_size == env.world_size && hello.rank < env.world_size;
        let rank = is_like_ours.then_some(hello.rank);
        Self {
            why,
            ends_all: env.job_token.is_secret(),
            rank,
            failure: hello.failure.clone(),
        }
    }
}

/// Refuses a caller of another job, version, build, number of ranks or seed. The seed is not
/// compared if rank 0 (`rank_0_fails`) or the caller cannot start, because that process may have
/// failed before it read its seed.
pub(super) fn check(
    hello: &Hello,
    env: &RankEnv,
    seed: u64,
    rank_0_fails: bool,
) -> Result<(), Refusal> {
    if hello.version != VERSION {
        let theirs = hello.version;
        let why = format!("its protocol version is {theirs}, rank 0's is {VERSION}");
        return Err(Refusal::of_stranger(why));
    }
    if !hello.token.agrees(&env.job_token) {
        return Err(Refusal::of_stranger(format!(
            "it belongs to another job: its job token (MEGABURN_JOB_TOKEN) differs from rank 0's \
            at {}",
            env.master()
        )));
    }
    let Hello {
        rank,
        world_size,
        build,
        ..
    } = hello;
    let mistake = |why: String| Err(Refusal::of_mistake(why, hello, env));
    let mine = build::name();
    let own = env.world_size;
    if build != mine {
        return mistake(format!(
            "rank {rank} runs build {build}, rank 0 build {mine}: install the same program on every host"
        ));
    }
    if *world_size != own {
        return mistake(format!(
            "rank {rank} was started with WORLD_SIZE={world_size}, rank 0 with {own}"
        ));
    }
    if hello.seed != seed && hello.failure.is_none() && !rank_0_fails {
        return mistake(format!(
            "rank {rank} has seed {}, rank 0 has {seed}",
            hello.seed
        ));
    }
    match &hello.failure {
        // The seed was not compared, so without a secret token the caller may belong to another
        // job.
        Some(failure) if !env.job_token.is_secret() && !rank_0_fails => {
            mistake(format!("rank {rank} cannot start: {}", failure.why))
        }
        _ => Ok(()),
    }
}

/// Refuses a caller whose rank is taken or does not exist.
pub(super) fn check_seat(hello: &Hello, env: &RankEnv, is_free: bool) -> Result<(), Refusal> {
    let rank = hello.rank;
    if rank > 0 && rank < env.world_size && is_free {
        Ok(())
    } else {
        let why = format!("two processes were started with RANK={rank}");
        Err(Refusal::of_mistake(why, hello, env))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::JobToken;

    fn env(job_token: JobToken) -> RankEnv {
        RankEnv {
            rank: 0,
            world_size: 2,
            local_rank: 0,
            local_world_size: 2,
            is_local_world_known: true,
            ranks_per_gpu: 1,
            master_addr: "127.0.0.1".into(),
            master_port: 1,
            job_token,
        }
    }

    fn hello(token: &JobToken) -> Hello {
        Hello {
            version: VERSION,
            token: token.clone(),
            build: build::name().into(),
            rank: 1,
            world_size: 2,
            seed: 7,
            port: 1,
            host: String::new(),
            on_host: None,
            failure: None,
        }
    }

    #[test]
    fn a_mistake_ends_the_job_only_if_it_is_the_jobs_own_for_certain() {
        let secret = JobToken::secret("s");
        for (token, ends_all) in [(secret, true), (JobToken::default(), false)] {
            let env = env(token.clone());
            let good = hello(&token);
            check(&good, &env, 7, false).unwrap();
            let wrong = [
                (
                    Hello {
                        build: "0.0.1-old".into(),
                        ..good.clone()
                    },
                    "runs build 0.0.1-old",
                ),
                (
                    Hello {
                        world_size: 3,
                        ..good.clone()
                    },
                    "WORLD_SIZE=3, rank 0 with 2",
                ),
                (
                    Hello {
                        seed: 8,
                        ..good.clone()
                    },
                    "has seed 8, rank 0 has 7",
                ),
            ];
            for (hello, named) in wrong {
                let refusal = check(&hello, &env, 7, false).unwrap_err();
                assert!(refusal.why.contains(named), "{}", refusal.why);
                assert_eq!(refusal.ends_all, ends_all, "{named}");
            }
            let taken = check_seat(&good, &env, false).unwrap_err();
            assert!(taken.why.contains("RANK=1") && taken.ends_all == ends_all);
        }
    }

    #[test]
    fn a_stranger_ends_nothing_and_learns_no_token() {
        let mine = JobToken::secret("mine");
        let env = env(mine.clone());
        let stranger = Hello {
            world_size: 99,
            ..hello(&JobToken::secret("theirs"))
        };
        let old = Hello {
            version: 2,
            ..hello(&mine)
        };
        for hello in [stranger, old] {
            let Refusal { why, ends_all, .. } = check(&hello, &env, 7, false).unwrap_err();
            assert!(
                !ends_all && !why.contains("mine") && !why.contains("theirs"),
                "{why}"
            );
        }
    }

    #[test]
    fn a_rank_that_cannot_start_need_not_know_its_seed_but_the_secret() {
        let failure = || {
            Some(StartFailure {
                rank: 1,
                why: "no data".into(),
                code: 2,
            })
        };
        let secret = JobToken::secret("s");
        let failing = Hello {
            seed: 0,
            failure: failure(),
            ..hello(&secret)
        };
        check(&failing, &env(secret), 7, false).unwrap();
        let token = JobToken::default();
        let failing = Hello {
            seed: 0,
            failure: failure(),
            ..hello(&token)
        };
        let refusal = check(&failing, &env(token.clone()), 7, false).unwrap_err();
        assert!(refusal.why.contains("rank 1 cannot start: no data") && !refusal.ends_all);
        assert_eq!((refusal.rank, refusal.failure), (Some(1), failure()));
        // If rank 0 fails as well, the report is accepted: it adds nothing new.
        check(&failing, &env(token), 7, true).unwrap();
    }

    #[test]
    fn a_caller_that_is_none_of_the_jobs_ranks_starts_no_countdown() {
        let token = JobToken::default();
        let env = env(token.clone());
        let other_size = Hello {
            world_size: 3,
            ..hello(&token)
        };
        let beyond = Hello {
            rank: 5,
            ..hello(&token)
        };
        assert_eq!(check(&other_size, &env, 7, false).unwrap_err().rank, None);
        assert_eq!(check_seat(&beyond, &env, false).unwrap_err().rank, None);
        let other_seed = Hello {
            seed: 8,
            ..hello(&token)
        };
        assert_eq!(
            check(&other_seed, &env, 7, false).unwrap_err().rank,
            Some(1)
        );
    }
}
