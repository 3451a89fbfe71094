use super::token::JobToken;
use crate::error::CollectiveError;

/// The rank of this process in its run, as given by the launcher in torchrun's environment
/// variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankEnv {
    /// `RANK`: this rank, from 0.
    pub rank: usize,
    /// `WORLD_SIZE`: the number of ranks.
    pub world_size: usize,
    /// `LOCAL_RANK`: this rank's number on its host, which selects its GPU.
    pub local_rank: usize,
    /// `LOCAL_WORLD_SIZE`: ranks on this host, which share its cores; defaults to all ranks.
    pub local_world_size: usize,
    /// Whether `LOCAL_WORLD_SIZE` was set.
    pub is_local_world_known: bool,
    /// `MEGABURN_RANKS_PER_GPU`: how many ranks of this host share a GPU; defaults to 1.
    pub ranks_per_gpu: usize,
    /// `MASTER_ADDR`: host name or address (IPv4, IPv6) of rank 0's host.
    pub master_addr: String,
    /// The port on which rank 0 listens: `MASTER_PORT`, or the next port under torchrun, because
    /// torchrun's agent runs a store of its own on `MASTER_PORT`.
    pub master_port: u16,
    /// Processes with another token are refused: `MEGABURN_JOB_TOKEN`, else the job's id from
    /// torchrun (`TORCHELASTIC_RUN_ID`) or Slurm (`SLURM_JOB_ID`, `SLURM_STEP_ID`).
    pub job_token: JobToken,
}

impl RankEnv {
    /// The environment variable with the GPUs visible to a process: numbers or names, separated by
    /// commas.
    pub const VISIBLE_GPUS: &str = "CUDA_VISIBLE_DEVICES";
    /// The environment variable with the number of ranks that share a GPU.
    pub const RANKS_PER_GPU: &str = "MEGABURN_RANKS_PER_GPU";

    /// Reads the environment; `None` if neither `RANK` nor `WORLD_SIZE` is set, as in a program
    /// that was started by hand.
    ///
    /// # Errors
    /// [`CollectiveError::BadEnvironment`]: some of `RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR
    /// MASTER_PORT` are missing or invalid.
    pub fn from_env() -> Result<Option<Self>, CollectiveError> {
        Self::from_lookup(|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, CollectiveError> {
        if get("RANK").is_none() && get("WORLD_SIZE").is_none() {
            return Ok(None);
        }
        let world_size = number(
            &get,
            "WORLD_SIZE",
            1,
            usize::MAX,
            "a number of ranks, 1 or more",
        )?;
        let below = format!("a rank below WORLD_SIZE={world_size}, counted from 0");
        let rank = number(&get, "RANK", 0, world_size - 1, &below)?;
        let local_rank = number(&get, "LOCAL_RANK", 0, rank, "at most RANK, counted from 0")?;
        let local_world_size = match get("LOCAL_WORLD_SIZE") {
            Some(_) => number(
                &get,
                "LOCAL_WORLD_SIZE",
                1,
                world_size,
                "at most WORLD_SIZE",
            )?,
            None => world_size,
        };
        let ranks_per_gpu = match get(Self::RANKS_PER_GPU) {
            Some(_) => number(
                &get,
                Self::RANKS_PER_GPU,
                1,
                usize::MAX,
                "a number of ranks, 1 or more",
            )?,
            None => 1,
        };
        let master_addr = without_brackets(text(&get, "MASTER_ADDR")?);
        let port = number(&get, "MASTER_PORT", 1, 65_535, "a port between 1 and 65535")?;
        let master_port = port_of_ranks(&get, port as u16);
        Ok(Some(Self {
            rank,
            world_size,
            local_rank,
            local_world_size,
            is_local_world_known: get("LOCAL_WORLD_SIZE").is_some(),
            ranks_per_gpu,
            master_addr,
            master_port,
            job_token: JobToken::from_lookup(&get),
        }))
    }

    /// This rank in another attempt of its job, with another `MASTER_ADDR`, `MASTER_PORT` and token.
    pub fn in_attempt(self, master_addr: String, master_port: u16, job_token: JobToken) -> Self {
        Self {
            master_addr: without_brackets(master_addr),
            master_port: port_of_ranks(&|name| std::env::var(name).ok(), master_port),
            job_token,
            ..self
        }
    }

    /// Selects this rank's GPU among the `num_gpus` visible to this process: the one with its local
    /// rank, or the only one if the launcher shows each rank its own (`CUDA_VISIBLE_DEVICES` is
    /// set). Returns `None` if there are too few GPUs.
    pub fn gpu(&self, num_gpus: usize) -> Option<usize> {
        self.gpu_of(num_gpus, std::env::var_os(Self::VISIBLE_GPUS).is_some())
    }

    fn gpu_of(&self, num_gpus: usize, is_chosen: bool) -> Option<usize> {
        let index = if num_gpus == 1 && is_chosen {
            0
        } else {
            self.local_rank
        };
        (index < num_gpus).then_some(index)
    }

    /// Whether rank 0 runs on this host and was started together with this rank.
    pub(crate) fn is_with_rank_0(&self) -> bool {
        self.is_local_world_known && self.rank == self.local_rank
    }

    /// The name to pass to [`super::socket::listen`] so that the other ranks can reach this one.
    /// The address of rank 0 is this host's own only if it is a loopback address.
    pub(crate) fn master_addr_for_peers(&self) -> &str {
        let loopback = self
            .master_addr
            .parse()
            .is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
        if loopback || self.master_addr == "localhost" {
            &self.master_addr
        } else {
            ""
        }
    }

    /// The address on which rank 0 listens, as text.
    pub(crate) fn master(&self) -> String {
        if self.master_addr.contains(':') {
            format!("[{}]:{}", self.master_addr, self.master_port)
        } else {
            format!("{}:{}", self.master_addr, self.master_port)
        }
    }
}

/// The port on which rank 0 listens if `MASTER_PORT` is `port`.
fn port_of_ranks(get: &impl Fn(&str) -> Option<String>, port: u16) -> u16 {
    match get("TORCHELASTIC_RUN_ID") {
        Some(_) => port.checked_add(1).unwrap_or(port - 1),
        None => port,
    }
}

/// Turns `[::1]` into `::1`: addresses with a port have IPv6 addresses in brackets.
fn without_brackets(addr: String) -> String {
    match addr
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
    {
        Some(inner) if inner.parse::<std::net::Ipv6Addr>().is_ok() => inner.to_string(),
        _ => addr,
    }
}

fn bad(variable: &str, why: String) -> CollectiveError {
    CollectiveError::BadEnvironment {
        variable: variable.to_string(),
        why,
    }
}

fn text(get: &impl Fn(&str) -> Option<String>, name: &str) -> Result<String, CollectiveError> {
    let hint = "start all ranks by `megaburn launch`, torchrun, or a launcher that sets RANK, \
                WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; or set none of them";
    match get(name).map(|value| value.trim().to_string()) {
        None => {
            let mut others = ["RANK", "WORLD_SIZE"]
                .into_iter()
                .filter(|other| *other != name);
            let set = others.find(|other| get(other).is_some()).unwrap_or("RANK");
            Err(bad(name, format!("is not set, though {set} is; {hint}")))
        }
        Some(value) if value.is_empty() => Err(bad(name, format!("is empty; {hint}"))),
        Some(value) => Ok(value),
    }
}

fn number(
    get: &impl Fn(&str) -> Option<String>,
    name: &str,
    min: usize,
    max: usize,
    wanted: &str,
) -> Result<usize, CollectiveError> {
    let value = text(get, name)?;
    match value.parse() {
        Ok(number) if (min..=max).contains(&number) => Ok(number),
        _ => Err(bad(name, format!("is {value:?}; it must be {wanted}"))),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const GOOD: [(&str, &str); 5] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "::1"),
        ("MASTER_PORT", "29500"),
    ];

    fn read(change: &[(&str, Option<&str>)]) -> Result<Option<RankEnv>, CollectiveError> {
        RankEnv::from_lookup(|name| {
            if let Some((_, value)) = change.iter().find(|(changed, _)| *changed == name) {
                return value.map(str::to_string);
            }
            GOOD.iter()
                .find(|(good, _)| *good == name)
                .map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn a_whole_environment_is_read() {
        let env = read(&[]).unwrap().unwrap();
        assert_eq!((env.rank, env.world_size, env.local_rank), (3, 4, 1));
        assert_eq!(env.master(), "[::1]:29500");
        assert_eq!(env.job_token, JobToken::default());
    }

    #[test]
    fn an_address_in_brackets_is_the_address() {
        let of = |addr| read(&[("MASTER_ADDR", Some(addr))]).unwrap().unwrap();
        assert_eq!(of("[fe80::1]").master_addr, "fe80::1");
        assert_eq!(of("[::1]"), of("::1"));
        assert_eq!(of("[host]").master_addr, "[host]");
    }

    #[test]
    fn a_rank_in_another_attempt_meets_the_others_elsewhere() {
        let first = read(&[]).unwrap().unwrap();
        let token = JobToken::secret("second");
        let next = first
            .clone()
            .in_attempt("[::2]".into(), 29_501, token.clone());
        assert_eq!(
            (next.master(), &next.job_token),
            ("[::2]:29501".into(), &token)
        );
        assert_eq!((next.rank, next.world_size), (first.rank, first.world_size));
    }

    #[test]
    fn a_rank_has_the_gpu_of_its_number_or_the_only_one_that_it_is_shown() {
        let env = read(&[]).unwrap().unwrap();
        assert_eq!(
            (env.gpu_of(4, false), env.gpu_of(4, true)),
            (Some(1), Some(1))
        );
        assert_eq!((env.gpu_of(1, false), env.gpu_of(1, true)), (None, Some(0)));
        assert_eq!(env.gpu_of(0, true), None);
        let shared = read(&[(RankEnv::RANKS_PER_GPU, Some("2"))])
            .unwrap()
            .unwrap();
        assert_eq!((env.ranks_per_gpu, shared.ranks_per_gpu), (1, 2));
    }

    #[test]
    fn without_rank_and_world_size_there_is_no_run() {
        assert_eq!(read(&[("RANK", None), ("WORLD_SIZE", None)]), Ok(None));
    }

    #[test]
    fn torchruns_own_store_keeps_its_port() {
        let elastic = [
            ("TORCHELASTIC_RUN_ID", Some("r7")),
            ("TORCHELASTIC_RESTART_COUNT", Some("2")),
        ];
        let env = read(&elastic).unwrap().unwrap();
        assert_eq!((env.master_port, env.job_token.text()), (29501, "r7/2"));
        let last = [
            ("TORCHELASTIC_RUN_ID", Some("r7")),
            ("MASTER_PORT", Some("65535")),
        ];
        assert_eq!(read(&last).unwrap().unwrap().master_port, 65534);
    }

    #[rstest]
    #[case(
        "RANK",
        "environment variable RANK is not set, though WORLD_SIZE is; start all"
    )]
    #[case(
        "WORLD_SIZE",
        "environment variable WORLD_SIZE is not set, though RANK is; start all"
    )]
    #[case(
        "LOCAL_RANK",
        "environment variable LOCAL_RANK is not set, though RANK is; start all"
    )]
    fn a_missing_variable_is_named_and_one_that_is_set(#[case] name: &str, #[case] message: &str) {
        let error = read(&[(name, None)]).unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }

    #[rstest]
    #[case("RANK", None)]
    #[case("WORLD_SIZE", None)]
    #[case("LOCAL_RANK", None)]
    #[case("MASTER_ADDR", Some(" "))]
    #[case("MASTER_PORT", None)]
    #[case("RANK", Some("4"))]
    #[case("RANK", Some("-1"))]
    #[case("WORLD_SIZE", Some("0"))]
    #[case("WORLD_SIZE", Some("four"))]
    #[case("LOCAL_RANK", Some("9"))]
    #[case("MASTER_PORT", Some("0"))]
    #[case("MASTER_PORT", Some("70000"))]
    fn nonsense_is_named_with_its_value(#[case] variable: &str, #[case] value: Option<&str>) {
        let error = read(&[(variable, value)]).unwrap_err();
        let CollectiveError::BadEnvironment {
            variable: named,
            why,
        } = &error
        else {
            panic!("{error}");
        };
        assert_eq!(named, variable);
        let value = value.map(str::trim).filter(|value| !value.is_empty());
        assert!(why.contains(value.unwrap_or("RANK")), "{error}");
    }
}
