//! The rules for the job: what ranks must have alike, and what they share.

use std::collections::BTreeSet;

use super::{by_value, bytes, in_words, one_per_host, outliers::SHARE, outliers::median};
use crate::{
    diagnosis::{Observation, rank_list},
    expected::{ExpectedGpu, LEAST_NVLINK},
    facts::RankFacts,
};

/// A clock may be this far from that of rank 0, in seconds.
const MOST_SKEW: f64 = 1.0;
/// Free space below which a folder is a finding.
const LEAST_FREE: u64 = 1 << 30;
/// Variables that may differ between ranks.
const OF_EACH_RANK: [&str; 3] = ["CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "NCCL_SOCKET_IFNAME"];

pub(super) fn programs(ranks: &[RankFacts]) -> Option<Observation> {
    let versions = by_value(ranks, |rank| Some(rank.program.clone()));
    Some(match versions.len() {
        0 => return None,
        1 => Observation::ok(
            "program",
            format!("megaburn {} on all ranks", ranks[0].program),
        ),
        _ => Observation::finding(
            "program",
            in_words(versions),
            "install the same version on all hosts",
        ),
    })
}

pub(super) fn ports(ranks: &[RankFacts]) -> Option<Observation> {
    let met = ranks.first()?.rendezvous.as_ref()?;
    Some(Observation::ok("ports", met))
}

pub(super) fn libraries(ranks: &[RankFacts]) -> Vec<Observation> {
    let names = ranks
        .iter()
        .flat_map(|rank| rank.libraries.iter().map(|library| library.name.clone()));
    let mut seen = BTreeSet::new();
    let names: Vec<String> = names.filter(|name| seen.insert(name.clone())).collect();
    let mut found = Vec::new();
    for name in &names {
        let of = |rank: &'_ RankFacts| {
            let library = rank.libraries.iter().find(|library| library.name == *name);
            library.cloned()
        };
        let errors = by_value(ranks, |rank| of(rank)?.error);
        for (error, ranks) in errors {
            let at = format!("{name} on ranks {}", rank_list(&ranks));
            found.push(Observation::finding("libraries", at, error));
        }
        let versions = by_value(ranks, |rank| of(rank)?.version);
        if versions.len() > 1 {
            found.push(Observation::finding(
                "libraries",
                format!("{name} {}", in_words(versions)),
                "install the same version on all hosts",
            ));
            continue;
        }
        let Some((version, _)) = versions.into_iter().next() else {
            continue;
        };
        let files = by_value(ranks, |rank| of(rank)?.file);
        let file = files.keys().next().map(|file| format!(" ({file})"));
        let text = format!("{name} {version}{}", file.unwrap_or_default());
        found.push(Observation::ok("libraries", text));
        for lacks in by_value(ranks, |rank| of(rank)?.lacks).into_keys() {
            found.push(Observation::note(
                "libraries",
                format!("{name} {version} {lacks}"),
            ));
        }
        let others: BTreeSet<String> = ranks
            .iter()
            .filter_map(of)
            .flat_map(|library| library.others)
            .collect();
        if !others.is_empty() {
            let others: Vec<String> = others.into_iter().collect();
            found.push(Observation::note(
                "libraries",
                format!("{name} is also there, and not used: {}", others.join(", ")),
            ));
        }
    }
    found
}

pub(super) fn environment(ranks: &[RankFacts]) -> Vec<Observation> {
    let names: BTreeSet<&String> = ranks
        .iter()
        .flat_map(|rank| rank.machine.environment.keys())
        .collect();
    let num_hosts = one_per_host(ranks).len();
    let mut found = Vec::new();
    let mut alike = Vec::new();
    for name in names {
        let values = by_value(ranks, |rank| {
            let value = rank.machine.environment.get(name);
            Some(value.map_or("not set".into(), |value| format!("{value:?}")))
        });
        let value = values.keys().next().cloned().unwrap_or_default();
        match name.as_str() {
            _ if values.len() > 1 && !OF_EACH_RANK.contains(&name.as_str()) => {
                found.push(Observation::finding(
                    "environment",
                    format!("{name} is {}", in_words(values)),
                    "set it to the same value on all hosts",
                ));
            }
            "CUDA_LAUNCH_BLOCKING" if value != "\"0\"" => found.push(Observation::finding(
                "environment",
                format!("{name} is {value}: the host waits for every kernel"),
                "unset it",
            )),
            "NCCL_SOCKET_IFNAME" if num_hosts > 1 && value == "\"lo\"" => {
                found.push(Observation::finding(
                    "environment",
                    format!("{name} is {value}, but {num_hosts} hosts take part"),
                    "set it to the interface of the network between the hosts",
                ));
            }
            "NCCL_P2P_DISABLE" | "NCCL_IB_DISABLE" | "NCCL_SHM_DISABLE" if value == "\"1\"" => {
                found.push(Observation::note(
                    "environment",
                    format!("{name} is {value}: NCCL does not use its fastest way"),
                ));
            }
            "NCCL_DEBUG" if ["\"INFO\"", "\"TRACE\""].contains(&value.to_uppercase().as_str()) => {
                found.push(Observation::note(
                    "environment",
                    format!("{name} is {value}: NCCL writes many lines"),
                ));
            }
            _ => alike.push(format!("{name}={}", value.trim_matches('"'))),
        }
    }
    if !alike.is_empty() {
        found.push(Observation::ok("environment", alike.join(" ")));
    }
    found
}

pub(super) fn clocks_of_hosts(ranks: &[RankFacts]) -> Vec<Observation> {
    let firsts = one_per_host(ranks);
    if firsts.len() < 2 {
        return Vec::new();
    }
    let ahead = |rank: &RankFacts| rank.clock_ahead_seconds;
    let wrong = firsts
        .iter()
        .filter_map(|rank| Some((rank, ahead(rank).filter(|ahead| ahead.abs() > MOST_SKEW)?)));
    let mut found: Vec<Observation> = wrong
        .map(|(rank, ahead)| {
            let side = if ahead > 0.0 { "ahead of" } else { "behind" };
            Observation::finding(
                "clock",
                format!(
                    "host {} is {:.2} s {side} host {}",
                    rank.host,
                    ahead.abs(),
                    ranks[0].host
                ),
                "synchronise the hosts' clocks (chrony or systemd-timesyncd; `timedatectl`)",
            )
        })
        .collect();
    if found.is_empty() {
        let most = firsts.iter().filter_map(|rank| ahead(rank)).map(f64::abs);
        let most = 1e3 * most.fold(0.0, f64::max);
        let text = format!("{} hosts within {most:.1} ms of each other", firsts.len());
        found.push(Observation::ok("clock", text));
    }
    found
}

pub(super) fn folder(ranks: &[RankFacts]) -> Vec<Observation> {
    let mut found = Vec::new();
    for rank in ranks {
        let Some(folder) = &rank.folder else { continue };
        if let Some(error) = &folder.error {
            found.push(Observation::finding(
                "folder",
                format!("{}: {error}", rank.place()),
                "make it writable for this user, free space, or choose another --folder",
            ));
        }
        if !folder.unseen.is_empty() {
            found.push(Observation::finding(
                "folder",
                format!(
                    "{} does not see in {} what ranks {} wrote there",
                    rank.place(),
                    folder.path,
                    rank_list(&folder.unseen)
                ),
                "mount the same file system at this path on all hosts, or use \
                 train.local_checkpoint_dir",
            ));
        }
    }
    let folders = || ranks.iter().filter_map(|rank| rank.folder.as_ref());
    let free = folders().filter_map(|folder| folder.free_bytes).min();
    if let (Some(free), Some(folder)) = (free.filter(|free| *free < LEAST_FREE), folders().next()) {
        found.push(Observation::finding(
            "folder",
            format!("{} are free in {}", bytes(free), folder.path),
            "remove old runs (`megaburn checkpoint prune`), or choose another --folder",
        ));
    }
    if let (true, Some(folder)) = (found.is_empty(), folders().next()) {
        let slowest = folders().filter_map(|folder| folder.write_seconds);
        let slowest = 1e3 * slowest.fold(0.0, f64::max);
        found.push(Observation::ok(
            "folder",
            format!(
                "{} is shared by all ranks: 1 MiB written, synced and renamed in {slowest:.1} ms, \
                 {} free",
                folder.path,
                free.map_or("?".into(), bytes)
            ),
        ));
    }
    found
}

pub(super) fn bandwidths(ranks: &[RankFacts]) -> Vec<Observation> {
    // A group has one bandwidth: that of its slowest member.
    let mut groups: Vec<(&[usize], &str, f64, bool, u64)> = Vec::new();
    for found in ranks.iter().flat_map(|rank| &rank.bandwidths) {
        let rate = found.bytes_per_second;
        match groups.iter_mut().find(|group| group.0 == found.members) {
            Some(group) => group.2 = group.2.min(rate),
            None => groups.push((
                &found.members,
                &found.group,
                rate,
                found.is_nccl,
                found.bytes,
            )),
        }
    }
    let kind = |name: &str, members: &[usize]| {
        (
            name.split_whitespace().next().map(String::from),
            members.len(),
        )
    };
    let mut observed = Vec::new();
    for &(members, name, rate, is_nccl, of_bytes) in &groups {
        let way = if is_nccl { "NCCL" } else { "the host" };
        let value = format!(
            "{name}: {:.2} GB/s bus bandwidth over {way}, all-reduce of {}",
            rate / 1e9,
            bytes(of_bytes)
        );
        let same = groups
            .iter()
            .filter(|other| kind(other.1, other.0) == kind(name, members));
        let mut same: Vec<f64> = same.map(|other| other.2).collect();
        let median = median(&mut same).unwrap_or(rate);
        let expected = by_nvlink(ranks, members).filter(|_| is_nccl);
        observed.push(match expected {
            Some(expected) if rate < LEAST_NVLINK * expected => Observation::finding(
                "bandwidth",
                format!("{value}, {:.0}% of NVLink's {:.0} GB/s", 100.0 * rate / expected, expected / 1e9),
                "look for inactive links above; `nvidia-smi topo -m` and NCCL_DEBUG=INFO show the \
                 way that NCCL takes; nvidia-fabricmanager must run",
            ),
            _ if is_nccl && rate < SHARE * median => Observation::finding(
                "bandwidth",
                format!(
                    "{value}, {:.0}% below the median of {} such groups",
                    100.0 * (1.0 - rate / median),
                    same.len()
                ),
                "compare the cables, switch ports and network cards of these hosts with the others'",
            ),
            _ => Observation::ok("bandwidth", value),
        });
    }
    observed
}

/// The bandwidth of NVLink if it connects all members, which are on one host.
fn by_nvlink(ranks: &[RankFacts], members: &[usize]) -> Option<f64> {
    let of = |member: &usize| ranks.iter().find(|rank| rank.rank == *member);
    let host = &of(members.first()?)?.host;
    let rates = members.iter().map(|member| {
        let rank = of(member).filter(|rank| rank.host == *host)?;
        let gpu = rank.gpu.as_ref()?;
        let is_linked = gpu.nvlinks.iter().any(|is_active| *is_active);
        let expected = ExpectedGpu::named(&gpu.name).filter(|_| is_linked)?;
        expected.nvlink_bytes_per_second
    });
    rates
        .collect::<Option<Vec<f64>>>()?
        .into_iter()
        .reduce(f64::min)
}
