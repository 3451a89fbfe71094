//! A schedule that is timed with many costs.

use super::Costs;
use crate::{
    action::{Action, Op},
    config::ScheduleConfig,
    error::PipelineError,
    stages::Stages,
    transfers,
};

/// No message.
const NONE: u32 = u32::MAX;

/// A schedule without its lists of actions, for a caller that asks for its time with many costs and
/// for its memory. It takes a small part of the time of [`ScheduleConfig::build`] and
/// [`Schedule::simulate`](crate::Schedule::simulate), whose numbers it has.
///
/// ```
/// use megaburn_pipeline::{Costs, Links, ScheduleConfig, ScheduleKind};
///
/// let config = ScheduleConfig::new(ScheduleKind::ZbH1, 4, 8);
/// let timing = config.build()?.simulate(&[Costs::UNIT; 4], Links::PrePosted)?;
/// assert_eq!(config.prepare()?.makespan(&[Costs::UNIT; 4])?, timing.makespan());
/// # Ok::<(), megaburn_pipeline::PipelineError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PreparedSchedule {
    stages: Stages,
    num_messages: usize,
    /// Every pass after those that it needs, whatever they cost.
    passes: Vec<Pass>,
    peaks: Vec<Vec<Vec<usize>>>,
}

/// A pass with the messages that it waits for and sends.
#[derive(Clone, Copy, Debug)]
struct Pass {
    op: Op,
    rank: u32,
    waits_for: u32,
    sends: u32,
    /// The link over which it sends.
    link: u32,
}

impl ScheduleConfig {
    /// Prepares the schedule to be timed. It is not proved, as [`build`](Self::build) does, but it
    /// has no deadlock with posted receives.
    ///
    /// # Errors
    /// The kind has no schedule of these sizes.
    pub fn prepare(&self) -> Result<PreparedSchedule, PipelineError> {
        let (orders, stages) = self.orders()?;
        let peaks = orders
            .iter()
            .map(|order| match self.kind.has_backward() {
                true => peaks(order, stages.num_chunks),
                false => Vec::new(),
            })
            .collect();
        // A pass starts after each pass that it needs, because every pass takes time.
        let mut sequence = Vec::with_capacity(orders.iter().map(Vec::len).sum());
        for (rank, passes) in transfers::timeline(&orders, stages)?
            .into_iter()
            .enumerate()
        {
            sequence.extend(
                passes
                    .into_iter()
                    .map(|(action, start)| (start, rank, action)),
            );
        }
        sequence.sort_by_key(|(start, ..)| *start);
        let most = self.num_micro_batches;
        let pass = |(_, rank, action)| Pass::new(stages, most, rank, action);
        Ok(PreparedSchedule {
            stages,
            num_messages: 2 * stages.num_stages() * most,
            passes: sequence.into_iter().map(pass).collect(),
            peaks,
        })
    }
}

impl PreparedSchedule {
    /// The stages that the schedule is for.
    pub fn stages(&self) -> Stages {
        self.stages
    }

    /// The time from the start of a step until the last rank is done, with receives that are posted
    /// ahead ([`Links::PrePosted`](crate::Links::PrePosted)), if rank r has `costs[r]`.
    ///
    /// # Errors
    /// The number of costs differs from the number of ranks.
    pub fn makespan(&self, costs: &[Costs]) -> Result<u64, PipelineError> {
        let expected = self.stages.num_ranks;
        let found = costs.len();
        if found != expected {
            return Err(PipelineError::Costs { found, expected });
        }
        let mut clocks = vec![0; expected];
        let mut busy_until = vec![0; 2 * expected];
        let mut arrived = vec![0; self.num_messages];
        for pass in &self.passes {
            let rank = pass.rank as usize;
            let costs = &costs[rank];
            let mut start = clocks[rank];
            if pass.waits_for != NONE {
                start = start.max(arrived[pass.waits_for as usize]);
            }
            let end = start
                + match pass.op {
                    Op::Forward => costs.forward,
                    Op::BackwardInput => costs.backward_input,
                    Op::BackwardWeight => costs.backward_weight,
                    _ => costs.backward_input + costs.backward_weight,
                };
            clocks[rank] = end;
            if pass.sends != NONE {
                let free: &mut u64 = &mut busy_until[pass.link as usize];
                *free = end.max(*free) + costs.transfer;
                arrived[pass.sends as usize] = *free;
            }
        }
        Ok(clocks.into_iter().max().unwrap_or(0))
    }

    /// The numbers of micro-batches whose activations a rank holds at once, one for each of its
    /// chunks: those of the moments that no other moment covers in every chunk. Memory that grows
    /// with these numbers is largest at one of them. None in a schedule without backward.
    pub fn peaks(&self, rank: usize) -> &[Vec<usize>] {
        &self.peaks[rank]
    }

    /// The number of passes of all ranks.
    pub fn num_passes(&self) -> usize {
        self.passes.len()
    }
}

impl Pass {
    fn new(stages: Stages, num_micro_batches: usize, rank: usize, action: Action) -> Self {
        let [receive, send] = match action.op {
            Op::Forward => [Op::ReceiveActivation, Op::SendActivation],
            _ => [Op::ReceiveGradient, Op::SendGradient],
        };
        let place = |op: Op| {
            let message = stages.message(rank, Action { op, ..action });
            message.map_or(NONE, |message| {
                let way = usize::from(message.is_gradient) * stages.num_stages();
                ((way + message.to_stage) * num_micro_batches + message.micro_batch) as u32
            })
        };
        let is_weight = action.op == Op::BackwardWeight;
        // A rank sends to the next rank and to the one before, which are the same one of two ranks.
        let next = (rank + 1) % stages.num_ranks;
        let peer = stages.peer(rank, Action { op: send, ..action });
        Self {
            op: action.op,
            rank: rank as u32,
            waits_for: if is_weight { NONE } else { place(receive) },
            sends: if is_weight { NONE } else { place(send) },
            link: (2 * rank + usize::from(peer != Some(next))) as u32,
        }
    }
}

/// The numbers of micro-batches in flight in the chunks of a rank that no others exceed.
fn peaks(order: &[Action], num_chunks: usize) -> Vec<Vec<usize>> {
    let mut in_flight = vec![0; num_chunks];
    let mut peaks: Vec<Vec<usize>> = Vec::new();
    let mut has_grown = false;
    let covers =
        |more: &[usize], less: &[usize]| more.iter().zip(less).all(|(more, less)| more >= less);
    for action in order {
        match action.op {
            Op::Forward => {
                in_flight[action.chunk] += 1;
                has_grown = true;
            }
            Op::Backward | Op::BackwardWeight => {
                if has_grown && !peaks.iter().any(|peak| covers(peak, &in_flight)) {
                    peaks.retain(|peak| !covers(&in_flight, peak));
                    peaks.push(in_flight.clone());
                }
                has_grown = false;
                in_flight[action.chunk] -= 1;
            }
            _ => {}
        }
    }
    peaks
}
