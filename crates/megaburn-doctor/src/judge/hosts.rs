//! The rules for hosts: memory, threads, limits.

use super::{bytes, one_per_host};
use crate::{
    diagnosis::Observation,
    facts::{Limit, RankFacts},
};

/// Files that a rank opens in addition to those for other ranks: data sets, checkpoints, libraries.
const OWN_FILES: u64 = 256;
/// Files for each other rank: connections, and the files of its checkpoints.
const FILES_PER_RANK: u64 = 4;
/// What NCCL puts into `/dev/shm` for each rank of a host.
const SHM_PER_RANK: u64 = 32 << 20;
/// Memory of the host that a rank needs for the program, its libraries and pinned buffers.
const MEMORY_PER_RANK: u64 = 1 << 30;

pub(super) fn judge(ranks: &[RankFacts]) -> Vec<Observation> {
    let firsts = one_per_host(ranks);
    let mut found = Vec::new();
    for rules in [memory, threads, open_files, locked_memory, shared_memory] {
        let of_hosts: Vec<Observation> = firsts
            .iter()
            .flat_map(|rank| rules(rank, ranks.len(), firsts.len()))
            .collect();
        let is_wrong = of_hosts.iter().any(Observation::is_finding);
        // One line about all hosts if they are well.
        match is_wrong {
            true => found.extend(of_hosts.into_iter().filter(Observation::is_finding)),
            false => found.extend(of_hosts.into_iter().take(1)),
        }
    }
    found
}

fn ranks_in_words(ranks: usize) -> String {
    match ranks {
        1 => "1 rank".into(),
        ranks => format!("{ranks} ranks"),
    }
}

fn memory(rank: &RankFacts, _: usize, _: usize) -> Option<Observation> {
    let host = &rank.machine;
    let (all, free) = (host.memory_bytes?, host.available_bytes?);
    let needed = MEMORY_PER_RANK * host.ranks as u64;
    let value = format!(
        "{} of {} available on host {}, for {}",
        bytes(free),
        bytes(all),
        rank.host,
        ranks_in_words(host.ranks)
    );
    Some(match free < needed {
        false => Observation::ok("memory", value),
        true => Observation::finding(
            "memory",
            value,
            format!(
                "end what holds the memory, or raise the container's limit: {} are needed",
                bytes(needed)
            ),
        ),
    })
}

fn threads(rank: &RankFacts, _: usize, _: usize) -> Option<Observation> {
    let host = &rank.machine;
    let (cores, ranks) = (host.cores, host.ranks);
    let each = host.rayon_threads.as_deref().map(str::parse::<usize>);
    let value = |threads: &str| {
        format!(
            "{cores} cores on host {} for {}, {threads}",
            rank.host,
            ranks_in_words(ranks)
        )
    };
    Some(match (each, &rank.gpu) {
        (Some(Err(_)), _) => Observation::finding(
            "threads",
            value(&format!(
                "RAYON_NUM_THREADS={}",
                host.rayon_threads.as_deref().unwrap_or_default()
            )),
            "set RAYON_NUM_THREADS to a number, or unset it",
        ),
        // 0 means all cores, as without the variable in Rayon.
        (Some(Ok(each)), _) if (if each == 0 { cores } else { each }) * ranks > cores => {
            Observation::finding(
                "threads",
                value(&format!("RAYON_NUM_THREADS={each} for each")),
                format!(
                    "unset RAYON_NUM_THREADS, or set it to {}",
                    (cores / ranks.max(1)).max(1)
                ),
            )
        }
        (None, Some(_)) if ranks > cores => Observation::finding(
            "threads",
            value("which share cores"),
            "give the job at least one core for each GPU (`--cpus-per-task`, limits of the pod)",
        ),
        (Some(Ok(each)), _) => {
            Observation::ok("threads", value(&format!("RAYON_NUM_THREADS={each}")))
        }
        (None, _) => Observation::ok("threads", value("RAYON_NUM_THREADS not set")),
    })
}

fn open_files(rank: &RankFacts, world: usize, _: usize) -> Option<Observation> {
    let needed = OWN_FILES + FILES_PER_RANK * world as u64;
    match rank.machine.open_files? {
        Limit::Of(limit) if limit < needed => Some(Observation::finding(
            "open files",
            format!(
                "{limit} at most on host {}; {world} ranks need {needed}",
                rank.host
            ),
            "`ulimit -n 65536` before the launch, or LimitNOFILE of its service",
        )),
        Limit::Of(limit) => Some(Observation::ok("open files", format!("up to {limit}"))),
        Limit::Unlimited => Some(Observation::ok("open files", "unlimited")),
    }
}

/// Network cards that write into memory directly need it locked.
fn locked_memory(rank: &RankFacts, _: usize, hosts: usize) -> Option<Observation> {
    let limit = rank.machine.locked_bytes?;
    let uses_cards = hosts > 1 && rank.gpu.is_some();
    Some(match limit {
        Limit::Unlimited => Observation::ok("locked memory", "unlimited"),
        Limit::Of(limit) if uses_cards => Observation::finding(
            "locked memory",
            format!("{} at most on host {}", bytes(limit), rank.host),
            "`ulimit -l unlimited`, LimitMEMLOCK=infinity of the scheduler's service, or \
             `--ulimit memlock=-1` of the container; otherwise NCCL cannot use InfiniBand",
        ),
        Limit::Of(limit) => Observation::ok(
            "locked memory",
            format!(
                "up to {}, which is enough on one host or without GPUs",
                bytes(limit)
            ),
        ),
    })
}

fn shared_memory(rank: &RankFacts, _: usize, _: usize) -> Option<Observation> {
    let host = &rank.machine;
    let (all, free) = (host.shm_bytes?, host.shm_free_bytes?);
    let value = format!(
        "{} of {} free in /dev/shm on host {}",
        bytes(free),
        bytes(all),
        rank.host
    );
    let needed = SHM_PER_RANK * host.ranks as u64;
    let is_used = rank.gpu.is_some() && host.ranks > 1;
    Some(match is_used && free < needed {
        false => Observation::ok("shared memory", value),
        true => Observation::finding(
            "shared memory",
            value,
            format!(
                "`--shm-size=1g` or `--ipc=host` of the container; NCCL needs {} for {} ranks",
                bytes(needed),
                host.ranks
            ),
        ),
    })
}
