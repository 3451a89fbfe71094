//! Finds ranks that are slower than the others, while the run trains.
//!
//! Each rank measures its own work in the parts of each step, without its waits in collectives. Every
//! `train.straggler_interval` steps rank 0 compares the times of all ranks by a [`rule`].

mod gpu;
mod gpu_times;
mod rule;

use std::{collections::BTreeMap, num::NonZero, thread, time::Duration};

use burn::prelude::Device;
use megaburn_collective::{CollectiveError, Group, ProcessGroups, SectionTime, host_name, objects};
use megaburn_mesh::Coords;
use serde::{Deserialize, Serialize};

use gpu::GpuProbe;
pub(crate) use rule::Straggler;
use rule::{Comparison, SLOWER, SLOWER_IN_TURNS, WindowWork};

/// GPUs multiply matrices again after steps that took this many seconds, so that an H100
/// spends a 500th of its time on them.
const BETWEEN_PRODUCTS: f64 = 2.0;

/// Measures a rank's steps, and on rank 0 compares those of all ranks.
#[derive(Debug)]
pub(crate) struct Stragglers {
    /// 0 measures nothing.
    interval: u64,
    /// The steps since the last comparison: their durations and the work of their parts.
    steps: Vec<(f64, BTreeMap<&'static str, f64>)>,
    gpu: Option<GpuProbe>,
    /// The seconds of the steps since the GPU multiplied its matrices.
    since_products: f64,
    place: RankPlace,
    has_gpus: bool,
    /// Whether no other rank computes on this rank's GPU.
    has_gpu_alone: bool,
    /// On rank 0 from the first comparison on.
    ranks: Option<(Vec<RankPlace>, Comparison)>,
    has_sent_place: bool,
    is_first: bool,
}

/// Where a rank runs, and what it works on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankPlace {
    pub(crate) host: String,
    /// The number of its GPU on the host.
    pub(crate) gpu: Option<usize>,
    /// Ranks with equal numbers do the same work.
    work: u64,
    /// The number of cores that its process may use.
    num_cores: usize,
}

/// A straggler with its place.
#[derive(Debug)]
pub(crate) struct PlacedStraggler {
    pub(crate) straggler: Straggler,
    pub(crate) place: RankPlace,
}

impl Stragglers {
    /// Compares every `interval` steps. `gpu` is the number of this rank's GPU on its host.
    pub(crate) fn new(
        interval: u64,
        groups: &ProcessGroups,
        gpu: Option<usize>,
        ranks_per_gpu: usize,
    ) -> Self {
        let is_alone = groups.world.size() == 1;
        Self {
            interval: if is_alone { 0 } else { interval },
            steps: Vec::new(),
            gpu: None,
            since_products: 0.0,
            place: RankPlace {
                host: host_name(),
                gpu,
                work: work_of(groups),
                num_cores: thread::available_parallelism().map_or(usize::MAX, NonZero::get),
            },
            has_gpus: gpu.is_some(),
            has_gpu_alone: gpu.is_some() && ranks_per_gpu == 1,
            ranks: None,
            has_sent_place: false,
            is_first: true,
        }
    }

    /// Forgets the work before a step.
    pub(crate) fn begin_step(&self, world: &Group) {
        if self.interval > 0 {
            world.take_section_times();
        }
    }

    /// Adds a step that has ended. The first one of a start is different from the others: it
    /// allocates, and compiles kernels on GPUs.
    pub(crate) fn end_step(&mut self, world: &Group, device: &Device) {
        if self.interval == 0 {
            return;
        }
        let times = world.take_section_times();
        if std::mem::take(&mut self.is_first) {
            if self.has_gpu_alone {
                self.gpu = GpuProbe::new(&device.clone().inner());
            }
            return;
        }
        let both = |time: &SectionTime| time.work + time.waiting;
        let step: Duration = times.values().map(both).sum();
        let work = |(name, time): (&'static str, SectionTime)| (name, time.work.as_secs_f64());
        let parts = times.into_iter().map(work).collect();
        self.steps.push((step.as_secs_f64(), parts));
    }

    /// Compares the ranks, if step `step` ends an interval. Returns those that are named for the
    /// first time, on rank 0.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// All ranks, with the same `step`; a few hundred bytes go to rank 0.
    pub(crate) fn compare(
        &mut self,
        step: u64,
        world: &Group,
    ) -> Result<Vec<PlacedStraggler>, CollectiveError> {
        if self.interval == 0 || !step.is_multiple_of(self.interval) || self.steps.is_empty() {
            return Ok(Vec::new());
        }
        let steps = std::mem::take(&mut self.steps);
        self.since_products += steps.iter().map(|step| step.0).sum::<f64>();
        let is_due = self.since_products >= BETWEEN_PRODUCTS;
        let gpu = self.gpu.as_ref().filter(|_| is_due);
        let gpu = gpu.and_then(GpuProbe::seconds);
        if is_due {
            // The remainder stays, so that ranks just below and above the bound measure equally often.
            self.since_products %= BETWEEN_PRODUCTS;
        }
        let mine = WindowWork::of(&steps, gpu);
        let place = (!self.has_sent_place).then(|| self.place.clone());
        self.has_sent_place = true;
        let all = objects::gather(world, &(place, mine))?;
        if world.rank() != 0 {
            return Ok(Vec::new());
        }
        let (places, window): (Vec<_>, Vec<WindowWork>) = all.into_iter().unzip();
        let (places, comparison) = self.ranks.get_or_insert_with(|| {
            let places: Vec<RankPlace> = places.into_iter().flatten().collect();
            let work = places.iter().map(|place| place.work).collect();
            let take_turns =
                !self.has_gpus && places.iter().any(|place| takes_turns(place, &places));
            let slower = if take_turns { SLOWER_IN_TURNS } else { SLOWER };
            let comparison = Comparison::new(work, self.has_gpus, self.interval);
            (places, comparison.with_slower(slower))
        });
        let placed = |straggler: Straggler| PlacedStraggler {
            place: places[straggler.rank].clone(),
            straggler,
        };
        Ok(comparison.add(window).into_iter().map(placed).collect())
    }
}

/// Whether the host of a rank has more ranks than the rank has cores.
fn takes_turns(place: &RankPlace, places: &[RankPlace]) -> bool {
    let on_host = places.iter().filter(|other| other.host == place.host);
    on_host.count() > place.num_cores
}

/// A number that is equal for ranks which do the same work: those of a pipeline stage, with experts
/// those which also hold the same experts.
fn work_of(groups: &ProcessGroups) -> u64 {
    let Coords { pp, ep, etp, .. } = groups.coords;
    let layout = groups.layout();
    let experts = if layout.ep > 1 {
        ep * layout.etp + etp
    } else {
        0
    };
    (pp * layout.ep.max(1) * layout.etp.max(1) + experts) as u64
}
