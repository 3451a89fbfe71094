//! What the ranks of a run did while a profile was taken.

use serde::{Deserialize, Serialize};

/// The profile of all ranks. All times are nanoseconds on rank 0's clock.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// The first and the last step.
    pub steps: [u64; 2],
    /// The run's id.
    pub run_id: String,
    /// The layout.
    pub layout: String,
    /// What is missing in it, and why.
    pub notes: Vec<String>,
    /// Each rank's part, in rank order.
    pub ranks: Vec<RankTrace>,
}

/// What one rank did. Times are nanoseconds: on the rank's own clock until it is
/// [moved](Self::shift), and then on rank 0's.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankTrace {
    /// The rank.
    pub rank: usize,
    /// Its host.
    pub host: String,
    /// The parts of its steps on its host thread: an outer part comes before those inside it.
    pub spans: Vec<SpanRecord>,
    /// Its collectives.
    pub calls: Vec<CallRecord>,
    /// The names of [`gpu`](Self::gpu).
    pub names: Vec<String>,
    /// What its GPU did. Empty on a CPU, and if kernels could not be recorded.
    pub gpu: Vec<GpuRecord>,
    /// What is missing, and why.
    pub notes: Vec<String>,
}

/// A part of a step on the host thread.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SpanRecord {
    /// What was done.
    pub name: String,
    /// Numbers that say which one it is.
    pub numbers: Vec<(String, u64)>,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

/// One collective.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CallRecord {
    /// The group's name.
    pub group: String,
    /// The operation.
    pub op: String,
    /// How many calls the group made before.
    pub seq: u64,
    /// The type of elements.
    pub dtype: String,
    /// The shape of this rank's part.
    pub shape: Vec<usize>,
    /// The bytes of this rank's part.
    pub bytes: u64,
    /// When it was made.
    pub start: u64,
    /// When it ended.
    pub end: u64,
    /// Who waited for its end.
    pub place: CallPlace,
}

/// Who waits for the end of a collective.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallPlace {
    /// The rank's thread.
    #[default]
    Host,
    /// Another thread of the rank.
    OtherThread,
    /// The GPU: the host continues.
    Gpu,
}

/// A kernel, a copy or a fill of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuRecord {
    /// The number of its name.
    pub name: usize,
    /// Whether it is a copy or a fill.
    pub is_copy: bool,
    /// The stream.
    pub stream: u32,
    /// The bytes of a copy.
    pub bytes: u64,
    /// When it began.
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

impl RankTrace {
    /// Moves all times by `offset` nanoseconds.
    pub fn shift(&mut self, offset: i64) {
        let moved = |time: &mut u64| *time = time.saturating_add_signed(offset);
        for span in &mut self.spans {
            moved(&mut span.start);
            moved(&mut span.end);
        }
        for call in &mut self.calls {
            moved(&mut call.start);
            moved(&mut call.end);
        }
        for work in &mut self.gpu {
            moved(&mut work.start);
            moved(&mut work.end);
        }
    }

    /// The steps of the rank: their numbers, and when they began and ended.
    pub fn steps(&self) -> impl Iterator<Item = (u64, [u64; 2])> {
        let steps = self.spans.iter().filter(|span| span.name == STEP);
        steps.map(|span| {
            let number = span.numbers.first().map_or(0, |(_, number)| *number);
            (number, [span.start, span.end])
        })
    }
}

/// The name of the span of a step, whose first number is that of the step.
pub(super) const STEP: &str = "step";

impl Trace {
    /// Moves all times so that the first is 0.
    pub fn start_at_zero(&mut self) {
        let first = self.ranks.iter().flat_map(|rank| {
            let spans = rank.spans.iter().map(|span| span.start);
            let calls = rank.calls.iter().map(|call| call.start);
            spans
                .chain(calls)
                .chain(rank.gpu.iter().map(|work| work.start))
        });
        let first = i64::try_from(first.min().unwrap_or(0)).unwrap_or(0);
        self.ranks.iter_mut().for_each(|rank| rank.shift(-first));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_moved_and_the_first_time_is_zero() {
        let span = |start, end| SpanRecord {
            name: STEP.into(),
            numbers: vec![("step".into(), 3)],
            start,
            end,
        };
        let rank = |rank, start| RankTrace {
            rank,
            spans: vec![span(start, start + 50)],
            gpu: vec![GpuRecord {
                start: start + 10,
                end: start + 20,
                ..GpuRecord::default()
            }],
            ..RankTrace::default()
        };
        let mut late = rank(1, 1_000);
        late.shift(-400);
        let mut trace = Trace {
            ranks: vec![rank(0, 700), late],
            ..Trace::default()
        };
        trace.start_at_zero();
        let steps: Vec<_> = trace.ranks.iter().flat_map(RankTrace::steps).collect();
        assert_eq!(steps, [(3, [100, 150]), (3, [0, 50])]);
        assert_eq!(
            (trace.ranks[1].gpu[0].start, trace.ranks[1].gpu[0].end),
            (10, 20)
        );
    }
}
