//! Finds the newest checkpoint that the hosts have between them.

use std::collections::BTreeSet;

use megaburn_collective::{Group, Phase, objects};

use crate::{
    agree::settle,
    checkpoint::{Checkpoint, manifest_text},
    error::CheckpointError,
    fault::retried,
    folder::{checkpoint_path, committed},
    hosts::{
        examine::examine_copy,
        judge::{CompleteCopies, judge_copies},
        map::Hosts,
    },
    latest::{Latest, Refused, warn},
    place::Place,
    verified::remember,
};

/// Like [`crate::find_latest`], for folders of the hosts. A file must be intact on one host.
///
/// # Collective
/// All ranks of `world`. Each rank verifies some of the files that are on its host.
pub(crate) fn find_latest(
    place: &Place,
    hosts: &Hosts,
    world: &Group,
) -> Result<Latest, CheckpointError> {
    let phase = world.phase(Phase::Load);
    let mine = if place.is_keeper(world) {
        retried(|| committed(place.dir()))
    } else {
        Ok(Vec::new())
    };
    let mine: Vec<u64> = settle(world, mine)?
        .into_iter()
        .map(|(step, _)| step)
        .collect();
    let all: Vec<Vec<u64>> = objects::gather(world, &mine)?;
    let steps: BTreeSet<u64> = all.into_iter().flatten().collect();
    let steps: BTreeSet<u64> = objects::broadcast(world, &steps)?;
    let mut latest = Latest {
        checkpoint: None,
        refused: Vec::new(),
    };
    let is_main = world.rank() == 0;
    for step in steps.into_iter().rev() {
        let path = checkpoint_path(place.dir(), step);
        let mine = examine_copy(&path, hosts.local(world.rank()), phase.progress());
        let judged = judge_copies(world, hosts, mine)?;
        remember(&path, judged.is_ok());
        match judged {
            Ok(copies) => {
                if is_main {
                    let faults = copies.faults.iter();
                    faults.for_each(|what| tracing::warn!("{what}; another host has it"));
                }
                latest.checkpoint = Some(open(place, hosts, world, step, copies)?);
                if is_main {
                    latest.warn_of_use();
                }
                return Ok(latest);
            }
            Err(why) => {
                let refused = Refused { path, why };
                if is_main {
                    warn(&refused);
                }
                latest.refused.push(refused);
            }
        }
    }
    Ok(latest)
}

/// Opens the checkpoint on every host, also where its manifest is not.
fn open(
    place: &Place,
    hosts: &Hosts,
    world: &Group,
    step: u64,
    copies: CompleteCopies,
) -> Result<Checkpoint, CheckpointError> {
    let path = checkpoint_path(place.dir(), step);
    if copies.hosts.len() == hosts.num_hosts() {
        let text = settle(world, retried(|| manifest_text(&path)))?;
        return Checkpoint::of_hosts(&path, text, copies.hosts_of_file);
    }
    let has_it = |rank: usize| copies.hosts.contains(&hosts.of(rank));
    let giver = (0..world.size()).find(|&rank| has_it(rank));
    let text = if giver == Some(world.rank()) {
        retried(|| manifest_text(&path)).map(Some)
    } else {
        Ok(None)
    };
    let texts: Vec<Option<String>> = objects::gather(world, &settle(world, text)?)?;
    let text = texts.into_iter().flatten().next();
    let text: Option<String> = objects::broadcast(world, &text)?;
    let text = text.expect("a host has the manifest");
    Checkpoint::of_hosts(&path, text, copies.hosts_of_file)
}
