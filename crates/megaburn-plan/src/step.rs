//! The time of a step and what a rank sends in it.

use megaburn_mesh::Axis;
use megaburn_pipeline::{Links, Op, Schedule, StageLayers, Timing};
use megaburn_train::estimate::{MemoryEstimate, RankParams};
use serde::Serialize;

use crate::{
    calibration::{BETWEEN_STEPS, HOST_LINK, INTERFERENCE},
    error::PlanError,
    memory::StageMemory,
    params::StageParams,
    parts::Passes,
    pipeline::{NANOSECONDS, Pipeline},
    rank::Rank,
    traffic::{Sent, Traffic, others},
};

/// The time of a step, in milliseconds of the pipeline stage that computes most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepTime {
    /// The whole step.
    pub step_ms: f64,
    /// Products of matrices.
    pub products_ms: f64,
    /// Core attention.
    pub attention_ms: f64,
    /// Kernels that wait for memory: norms, activations, the loss.
    pub memory_bound_ms: f64,
    /// Communication inside of layers and between data-parallel ranks that nothing hides.
    pub communication_ms: f64,
    /// What communication that runs while kernels compute costs these.
    pub interference_ms: f64,
    /// Waiting for the other stages of the pipeline.
    pub bubble_ms: f64,
    /// The norm of the gradients and the update of the parameters.
    pub optimizer_ms: f64,
    /// Waiting for the host, and the time between steps.
    pub host_ms: f64,
}

/// A step of a run: its time, its schedule and its traffic.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) time: StepTime,
    pub(crate) traffic: Vec<Traffic>,
    pub(crate) schedule: Schedule,
    pub(crate) timing: Timing,
    /// The idle time of the busiest rank as a share of the time of all passes.
    pub(crate) bubble: f64,
}

/// What a rank sends to the ranks that hold copies of its parameters.
#[derive(Clone, Copy, Debug, Default)]
struct Replicated {
    /// Seconds of a reduction of all gradients, of a gathering of all parameters, and of those that
    /// backward gathers again with `zero` 3.
    reduce: f64,
    gather: f64,
    gather_again: f64,
    /// Seconds of the last bucket of gradients, after which nothing is left to compute.
    last: f64,
    /// Bytes of these.
    reduced: f64,
    gathered: f64,
    gathered_again: f64,
}

/// The share of the passes' time in which the busiest stage waits for others.
pub(crate) fn bubble_fraction(time: &StepTime, of_pipeline: f64) -> f64 {
    if of_pipeline > 0.0 {
        time.bubble_ms / 1e3 / of_pipeline
    } else {
        0.0
    }
}

impl Rank<'_> {
    /// The step of all stages.
    ///
    /// # Errors
    /// There is no schedule of these sizes.
    pub(crate) fn step(
        &self,
        params: &StageParams,
        memory: &[StageMemory],
    ) -> Result<Step, PlanError> {
        let schedule = self.schedule(self.micro_batches).build()?;
        let pipeline = self.pipeline();
        let timing = schedule.simulate(&pipeline.costs, Links::PrePosted)?;
        let of_pipeline = timing.makespan() as f64 / NANOSECONDS;
        let time = self.time(&pipeline, params, memory, of_pipeline);
        let traffic = |(rank, chunks): (usize, &Vec<StageLayers>)| {
            self.traffic(chunks, params.of(rank), &schedule, rank)
        };
        Ok(Step {
            traffic: self.stages().iter().enumerate().map(traffic).collect(),
            bubble: bubble_fraction(&time, of_pipeline),
            time,
            schedule,
            timing,
        })
    }

    /// The time of a step in which the pipeline takes `of_pipeline` seconds.
    pub(crate) fn time(
        &self,
        pipeline: &Pipeline,
        params: &StageParams,
        memory: &[StageMemory],
        of_pipeline: f64,
    ) -> StepTime {
        let busiest = pipeline.busiest;
        let passes = &pipeline.passes[busiest];
        let all = passes.total() * self.micro_batches as f64;
        let bubble = (of_pipeline - all.total()).max(0.0);
        let replicated = self.replicated(params.of(busiest), &self.stages()[busiest]);
        let [exposed, hidden] = self.over_replicas(replicated, passes);
        let updates = params
            .different()
            .map(|stage| self.update(&memory[stage], params.of(stage)));
        let optimizer = updates.fold(0.0, f64::max);
        let interference = INTERFERENCE * hidden;
        let seconds = of_pipeline + exposed + interference + optimizer + BETWEEN_STEPS;
        StepTime {
            step_ms: seconds * 1e3,
            products_ms: all.products * 1e3,
            attention_ms: all.attention * 1e3,
            memory_bound_ms: all.memory * 1e3,
            communication_ms: (all.communication + exposed) * 1e3,
            interference_ms: interference * 1e3,
            bubble_ms: bubble * 1e3,
            optimizer_ms: optimizer * 1e3,
            host_ms: (all.host + BETWEEN_STEPS) * 1e3,
        }
    }

    /// The blocks of a chunk; those of multi-token prediction are in the last one.
    pub(crate) fn blocks_of(&self, chunk: &StageLayers) -> impl Iterator<Item = usize> {
        let further = if chunk.loss { self.model.mtp_layers } else { 0 };
        let last = self.model.layers;
        chunk.layers.clone().chain(last..last + further)
    }

    /// What a rank with these parameters and chunks sends to those with copies of them.
    fn replicated(&self, params: &RankParams, chunks: &[StageLayers]) -> Replicated {
        let mut all = Replicated::default();
        let experts = params.expert_elements();
        let of = [
            (
                params.elements() - experts,
                false,
                &[Axis::Dp, Axis::Cp][..],
            ),
            (experts, true, &[Axis::Edp][..]),
        ];
        let parameter = match self.config.precision.fp8_param_gather {
            true => 1.0,
            false => self.element,
        };
        for (elements, of_experts, axes) in of {
            let replicas: usize = axes.iter().map(|axis| self.layout.degree(*axis)).product();
            if replicas == 1 || elements == 0 {
                continue;
            }
            let zero = self.config.parallel.zero;
            let shares = match zero {
                0 => 1,
                _ => MemoryEstimate::num_shares(self.config, &self.layout, of_experts),
            };
            let bandwidth = self.links(axes).ring();
            let elements = elements as f64;
            // Within the ranks that shard, and then the shares over their copies.
            let inner = others(shares) * elements;
            let outer = 2.0 * others(replicas / shares) * elements / shares as f64;
            let reduced = self.gradient * (inner + outer);
            let read = match zero {
                3 => params.sharded_elements(of_experts) as f64,
                _ => elements,
            };
            let gathered = parameter * others(shares) * read;
            // Backward does not read the embedding, and reads the output matrix first, which is
            // still there.
            let ends = if of_experts { 0.0 } else { self.ends(chunks) };
            let again = parameter * others(shares) * (read - ends).max(0.0);
            all.reduced += reduced;
            all.gathered += gathered;
            all.gathered_again += again;
            all.reduce += reduced / bandwidth;
            all.gather += gathered / bandwidth;
            all.gather_again += again / bandwidth;
            if !of_experts {
                let last = params.largest() as f64 / elements;
                all.last = last.min(1.0) * reduced / bandwidth;
            }
        }
        all
    }

    /// Elements of the embedding and the output matrix of these chunks.
    fn ends(&self, chunks: &[StageLayers]) -> f64 {
        let has_embedding = chunks.iter().any(|chunk| chunk.embedding);
        let has_head = chunks.iter().any(|chunk| chunk.loss);
        let ends = match (has_embedding, has_head) {
            (true, true) if !self.model.tied => 2.0,
            (true, _) | (_, true) => 1.0,
            (false, false) => 0.0,
        };
        ends * self.vocab() * self.sizes().hidden
    }

    /// Seconds of communication over the ranks with the same parameters in a step: exposed, and
    /// hidden by passes.
    fn over_replicas(&self, sent: Replicated, passes: &Passes) -> [f64; 2] {
        let zero = self.config.parallel.zero;
        let times = self.micro_batches as f64;
        let (reductions, gathers, again) = match zero {
            0 => (1.0, 0.0, 0.0),
            1 => (1.0, 1.0, 0.0),
            2 => (times, 1.0, 0.0),
            _ => (times, times, times),
        };
        let all = reductions * sent.reduce + gathers * sent.gather + again * sent.gather_again;
        if !self.config.parallel.overlap {
            return [all, 0.0];
        }
        let forward = passes.forward.total();
        let backward = passes.input.total() + passes.weight.total();
        let exposed = |sent: f64, passes: f64| (sent - passes).max(0.0);
        let exposed = match zero {
            3 => {
                let backward = exposed(sent.reduce + sent.gather_again, backward);
                times * (backward + exposed(sent.gather, forward)) + sent.last
            }
            _ => {
                let reduced = exposed(sent.reduce, backward);
                reductions * reduced.max(sent.last) + gathers * exposed(sent.gather, forward)
            }
        };
        let exposed = exposed.min(all);
        [exposed, all - exposed]
    }

    /// Seconds of the norm of the gradients and of the update.
    fn update(&self, memory: &StageMemory, params: &RankParams) -> f64 {
        let experts = params.expert_elements() as f64;
        let dense = params.elements() as f64 - experts;
        let shares = |of_experts| match self.config.parallel.zero {
            0 => 1.0,
            _ => MemoryEstimate::num_shares(self.config, &self.layout, of_experts) as f64,
        };
        let elements = dense / shares(false) + experts / shares(true);
        let offloaded = self.config.optimizer.cpu_offload_fraction;
        let kept = memory.optimizer_bytes as f64;
        let state = if offloaded < 1.0 {
            kept / (1.0 - offloaded)
        } else {
            12.0 * elements
        };
        // The norm reads gradients; the update reads them again, reads and writes the state, and
        // writes parameters.
        let bytes = elements * (2.0 * self.gradient + self.element) + 2.0 * state;
        self.machine.memory(bytes) + offloaded * state / HOST_LINK
    }

    /// What the rank of a stage sends in a step.
    fn traffic(
        &self,
        chunks: &[StageLayers],
        params: &RankParams,
        schedule: &Schedule,
        rank: usize,
    ) -> Traffic {
        let times = self.micro_batches as f64;
        let mut traffic = Traffic::default();
        let both = |sent: [Sent; 2]| sent[0].bytes + sent[1].bytes;
        for chunk in chunks {
            for (position, index) in self.blocks_of(chunk).enumerate() {
                let again = if self.is_recomputed(position) {
                    1.0
                } else {
                    0.0
                };
                let sent = |sent: [Sent; 2]| times * (both(sent) + again * sent[0].bytes);
                traffic.tp_bytes += sent(self.sent_by_block_over_tp(index));
                traffic.cp_bytes += sent(self.sent_over_cp(index));
                traffic.ep_bytes += sent(self.sent_over_ep(index));
            }
            for (has_end, is_first) in [(chunk.embedding, true), (chunk.loss, false)] {
                if has_end {
                    traffic.tp_bytes += times * both(self.sent_by_end_over_tp(is_first));
                }
            }
        }
        let sent = self.replicated(params, chunks);
        traffic.dp_bytes = match self.config.parallel.zero {
            0 => sent.reduced,
            1 => sent.reduced + sent.gathered,
            2 => times * sent.reduced + sent.gathered,
            _ => times * (sent.reduced + sent.gathered + sent.gathered_again),
        };
        let is_sent = |op: Op| matches!(op, Op::SendActivation | Op::SendGradient);
        let messages = schedule.ranks[rank]
            .iter()
            .filter(|action| is_sent(action.op))
            .count();
        traffic.pp_bytes = messages as f64 * self.sent_between_stages();
        traffic
    }
}
