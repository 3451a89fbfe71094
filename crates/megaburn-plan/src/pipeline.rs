//! What the ranks of a pipeline compute for a micro-batch.

use std::collections::HashMap;

use megaburn_mesh::Axis;
use megaburn_pipeline::{Costs, ScheduleConfig, StageLayers};

use crate::{
    parts::{Parts, Passes},
    rank::Rank,
    traffic::Sent,
};

pub(crate) const NANOSECONDS: f64 = 1e9;

/// What the ranks of a pipeline compute for a micro-batch.
#[derive(Clone, Debug)]
pub(crate) struct Pipeline {
    /// The number of chunks of each rank.
    pub(crate) chunks: usize,
    pub(crate) passes: Vec<Passes>,
    /// Nanoseconds of a pass through one chunk of each rank.
    pub(crate) costs: Vec<Costs>,
    /// The rank that computes longest.
    pub(crate) busiest: usize,
}

impl Pipeline {
    /// The least nanoseconds in which a schedule with joint or with split backward passes computes
    /// `micro_batches`. Each rank first waits for a forward on every rank before it. Where backward
    /// is joint, these ranks also compute a backward after the last one of this rank.
    pub(crate) fn least(&self, micro_batches: usize, is_split: bool) -> u64 {
        let times = (micro_batches * self.chunks) as u64;
        let mut before = 0;
        let mut least = 0;
        for costs in &self.costs {
            least = least.max(before + times * costs.step());
            before += costs.forward + costs.transfer;
            if !is_split {
                before += costs.backward_input + costs.backward_weight + costs.transfer;
            }
        }
        least
    }
}

impl Rank<'_> {
    /// The schedule of a step of this number of micro-batches.
    pub(crate) fn schedule(&self, micro_batches: usize) -> ScheduleConfig {
        let parallel = &self.config.parallel;
        parallel.schedule(self.layout.pp, micro_batches)
    }

    /// The number of micro-batches of the schedule that decides how many activations a rank holds.
    pub(crate) fn micro_batches_held(&self) -> usize {
        match self.config.parallel.max_tokens_per_rank {
            Some(_) => 1,
            None => self.micro_batches,
        }
    }

    /// What the ranks of the pipeline compute for a micro-batch.
    pub(crate) fn pipeline(&self) -> Pipeline {
        let stages = self.stages();
        let mut known = HashMap::new();
        let passes: Vec<Passes> = stages
            .iter()
            .map(|chunks| self.passes(chunks, &mut known))
            .collect();
        let chunks = stages.first().map_or(1, Vec::len);
        let transfer = match self.layout.pp {
            1 => 0.0,
            _ => {
                let sent = Sent::new(self.sent_between_stages(), 1.0);
                sent.seconds(self.links(&[Axis::Pp]).neighbour())
            }
        };
        let costs = |passes: &Passes| {
            let cost = |parts: Parts| (parts.total() / chunks as f64 * NANOSECONDS) as u64;
            Costs {
                forward: cost(passes.forward),
                backward_input: cost(passes.input),
                backward_weight: cost(passes.weight),
                transfer: (transfer * NANOSECONDS) as u64,
            }
        };
        let costs: Vec<Costs> = passes.iter().map(costs).collect();
        let busiest = (0..costs.len()).max_by_key(|rank| costs[*rank].step());
        Pipeline {
            chunks,
            busiest: busiest.unwrap_or(0),
            passes,
            costs,
        }
    }

    /// The passes of a micro-batch through all chunks of a rank. `known` has those of blocks, by the
    /// first block like them and whether backward recomputes them.
    fn passes(&self, chunks: &[StageLayers], known: &mut HashMap<(usize, bool), Passes>) -> Passes {
        let mut all = Passes::default();
        for StageLayers {
            embedding, loss, ..
        } in chunks
        {
            if *embedding {
                all += self.embedding();
            }
            if *loss {
                all += self.head();
            }
        }
        for chunk in chunks {
            for (position, index) in self.blocks_of(chunk).enumerate() {
                let key = (self.alike(index), self.is_recomputed(position));
                all += *known
                    .entry(key)
                    .or_insert_with(|| self.block(index, position));
            }
        }
        all
    }
}
