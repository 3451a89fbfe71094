//! The rules: what is well and what is not.

mod gpus;
mod hosts;
mod job;
mod outliers;

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    diagnosis::{Diagnosis, rank_list},
    facts::RankFacts,
};

/// Compares the facts of all ranks with the rules and with each other.
pub fn judge(ranks: Vec<RankFacts>) -> Diagnosis {
    let mut observations = Vec::new();
    observations.extend(job::programs(&ranks));
    observations.extend(job::ports(&ranks));
    observations.extend(job::libraries(&ranks));
    observations.extend(job::environment(&ranks));
    observations.extend(job::clocks_of_hosts(&ranks));
    observations.extend(job::folder(&ranks));
    observations.extend(hosts::judge(&ranks));
    observations.extend(gpus::judge(&ranks));
    observations.extend(job::bandwidths(&ranks));
    // A stable sort: the order of the checks stays.
    observations.sort_by_key(|observation| observation.kind);
    let mut hosts: Vec<(String, Vec<usize>)> = Vec::new();
    for rank in &ranks {
        match hosts.iter_mut().find(|(host, _)| *host == rank.host) {
            Some((_, of_host)) => of_host.push(rank.rank),
            None => hosts.push((rank.host.clone(), vec![rank.rank])),
        }
    }
    let unchecked: BTreeSet<&String> = ranks.iter().flat_map(|rank| &rank.unchecked).collect();
    Diagnosis {
        is_well: !observations.iter().any(|found| found.is_finding()),
        num_ranks: ranks.len(),
        hosts,
        observations,
        unchecked: unchecked.into_iter().cloned().collect(),
        ranks,
    }
}

/// The ranks that have each value, for values that should be alike.
fn by_value<'a>(
    ranks: &'a [RankFacts],
    value: impl Fn(&'a RankFacts) -> Option<String>,
) -> BTreeMap<String, Vec<usize>> {
    let mut found: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for rank in ranks {
        if let Some(value) = value(rank) {
            found.entry(value).or_default().push(rank.rank);
        }
    }
    found
}

/// Differing values with their ranks, the most frequent first.
fn in_words(values: BTreeMap<String, Vec<usize>>) -> String {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by_key(|(_, ranks)| std::cmp::Reverse(ranks.len()));
    let texts = values.into_iter().map(|(value, ranks)| {
        let plural = if ranks.len() == 1 { "" } else { "s" };
        format!("{value} on rank{plural} {}", rank_list(&ranks))
    });
    texts.collect::<Vec<_>>().join(", ")
}

/// The facts of one rank of each host.
fn one_per_host(ranks: &[RankFacts]) -> Vec<&RankFacts> {
    let mut seen = BTreeSet::new();
    ranks
        .iter()
        .filter(|rank| seen.insert(rank.host.as_str()))
        .collect()
}

/// Bytes for people.
fn bytes(bytes: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let unit = (bytes.max(1).ilog2() / 10).min(4) as usize;
    match unit {
        0 => format!("{bytes} bytes"),
        _ => format!(
            "{:.1} {}",
            bytes as f64 / (1u64 << (10 * unit)) as f64,
            units[unit]
        ),
    }
}
