//! Ranks of a large run walk the real code of a step, one at a time and without the others.

mod matched;
mod narrow;

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use burn::prelude::Device;
use megaburn_collective::{Group, GroupOptions, ProcessGroups};
use megaburn_mesh::{Axis, Layout, Mesh};
use megaburn_train::{RunData, TrainConfig, TrainError, Trainer};
use serde::Serialize;

use self::matched::Calls;
use crate::{error::PlanError, in_parallel::in_parallel};

/// Micro-batches of a walked step, rounded up to a multiple of the stages.
const WALKED_MICRO_BATCHES: usize = 4;

/// Walks of ranks of a run that agree with each other.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Walk {
    /// The layout of the run.
    pub layout: Layout,
    /// The ranks that walked.
    pub ranks: Vec<usize>,
    /// Collectives that they called in a step.
    pub calls: usize,
    /// Calls that were compared with those of a rank that meets them.
    pub compared: usize,
    /// How long it took.
    #[serde(skip)]
    pub time: Duration,
}

impl Walk {
    /// Lets ranks train a step, each without the others and without a GPU: the first one of each
    /// pipeline stage, and for the first and the last stage the farthest one along each axis of the
    /// mesh. Compares their collectives in the groups of which both are members: order, operations,
    /// shapes and types.
    ///
    /// The run keeps its layers, heads, experts, schedule and layout. Its matrices are narrow, its
    /// samples short and generated, and a step has at most as many micro-batches as fill the
    /// pipeline, so that a rank of thousands walks in a second. Where a router decides what ranks
    /// exchange, calls are not compared.
    ///
    /// # Errors
    /// The layout does not split the model, code of a rank fails, or the calls of two ranks differ.
    pub fn of(config: &TrainConfig, layout: Layout) -> Result<Self, PlanError> {
        let from = Instant::now();
        let narrow = Arc::new(narrow::narrowed(config, &layout)?);
        let data = Arc::new(RunData::load(&narrow)?);
        let ranks = walked(layout);
        let walks = in_parallel(&ranks, |&rank| walk(&narrow, layout, &data, rank));
        let walks: Vec<Calls> = walks.into_iter().collect::<Result<_, _>>()?;
        let mut compared = 0;
        for (at, one) in walks.iter().enumerate() {
            for other in &walks[at + 1..] {
                compared += one.compare(other)?;
            }
        }
        Ok(Self {
            layout,
            ranks,
            calls: walks.iter().map(Calls::len).sum(),
            compared,
            time: from.elapsed(),
        })
    }
}

impl fmt::Display for Walk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "walked   a step of {} of {} ranks with narrow matrices in {:.1} s: {} collectives, {} compared, all agree",
            self.ranks.len(),
            self.layout.world_size(),
            self.time.as_secs_f64(),
            self.calls,
            self.compared
        )
    }
}

/// The ranks that walk.
fn walked(layout: Layout) -> Vec<usize> {
    let mesh = Mesh::new(layout);
    let of_stage = layout.world_size() / layout.pp;
    let mut ranks: Vec<usize> = (0..layout.pp).map(|stage| stage * of_stage).collect();
    let within = [Axis::Tp, Axis::Cp, Axis::Dp, Axis::Etp, Axis::Ep, Axis::Edp];
    for first in [0, layout.world_size() - of_stage] {
        let farthest = within.map(|axis| mesh.group_of(&[axis], first));
        ranks.extend(farthest.iter().filter_map(|group| group.last()));
    }
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// The calls of a rank in its first step.
fn walk(
    config: &Arc<TrainConfig>,
    layout: Layout,
    data: &Arc<RunData>,
    rank: usize,
) -> Result<Calls, TrainError> {
    let world = Group::rehearsal(rank, layout.world_size(), GroupOptions::default());
    let groups = ProcessGroups::new(&world, layout)?;
    let device = Device::flex().autodiff();
    let mut trainer = Trainer::new(config.clone(), groups, device, data.clone())?;
    world.trace_calls();
    trainer.step()?;
    let members = world.rehearsed_groups();
    Ok(Calls::new(rank, members, world.take_traced_calls()))
}
