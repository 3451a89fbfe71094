//! Profiles of a run: what each rank's host and GPU did in the steps of `profile.steps`.

mod clock;
mod device;

use std::{
    thread,
    time::{Duration, Instant},
};

use burn::prelude::Device;
use megaburn_collective::{Group, Phase, TracedCall, host_name, objects};
use megaburn_report::profile::{
    CallPlace, CallRecord, Range, RankTrace, Span, SpanRecord, Spans, Trace, now_ns, ns_of,
};

use crate::{config::TrainConfig, error::TrainError};
use clock::offset_to_rank_0;
use device::DeviceTrace;

/// How long the ends of collectives on GPUs, which another thread notices, are waited for.
const LATE_ENDS: Duration = Duration::from_secs(2);

/// Takes the profile of a rank's steps, if the run asks for one.
#[derive(Debug)]
pub(crate) struct Profiler {
    /// The first and the last step, until the profile is taken.
    window: Option<[u64; 2]>,
    spans: Spans,
    /// The profile that is being taken.
    recording: Option<Recording>,
}

#[derive(Debug)]
struct Recording {
    device: DeviceTrace,
    first: u64,
    /// The last step that was begun.
    last: u64,
}

impl Profiler {
    /// The profiler of a rank whose parts of a step are recorded by `spans`.
    ///
    /// # Errors
    /// `profile.steps` is not valid.
    pub(crate) fn new(config: &TrainConfig, spans: Spans) -> Result<Self, TrainError> {
        Ok(Self {
            window: config.profile.window()?,
            spans,
            recording: None,
        })
    }

    /// Begins step `step`, which ends when the returned range is dropped, and the profile, if it is
    /// its first step.
    pub(crate) fn step(&mut self, step: u64, world: &Group, device: &Device) -> Range {
        let is_inside = |[first, last]: &[u64; 2]| (*first..=*last).contains(&step);
        if self.recording.is_none() && self.window.as_ref().is_some_and(is_inside) {
            // The first reading starts the clock, which earlier times begin at.
            now_ns();
            self.recording = Some(Recording {
                device: DeviceTrace::begin(device),
                first: step,
                last: step,
            });
            world.trace_calls();
            self.spans.begin();
        }
        if let Some(recording) = &mut self.recording {
            recording.last = step;
        }
        self.spans.numbered("step", || [("step", step)])
    }

    /// Ends the profile after its last step, or earlier if the run ends (`is_last`). Returns it on
    /// rank 0.
    ///
    /// # Errors
    /// A failed collective.
    /// # Collective
    /// All ranks, with the same `step`.
    pub(crate) fn finish(
        &mut self,
        step: u64,
        is_last: bool,
        world: &Group,
    ) -> Result<Option<Trace>, TrainError> {
        let is_over = self.window.is_some_and(|[_, last]| step >= last) || is_last;
        let Some(Recording {
            device,
            first,
            last,
        }) = self.recording.take_if(|_| is_over)
        else {
            return Ok(None);
        };
        self.window = None;
        let mut rank = RankTrace {
            rank: world.rank(),
            host: host_name(),
            ..RankTrace::default()
        };
        let spans = self.spans.take();
        rank.spans = spans.into_iter().map(span_record).collect();
        // Others wait while this rank collects its kernels.
        let _collecting = world.phase(Phase::Save);
        device.finish(&mut rank);
        let late = Instant::now();
        while !world.has_ended_traced_calls() && late.elapsed() < LATE_ENDS {
            thread::sleep(Duration::from_millis(5));
        }
        let now = now_ns();
        let calls = world.take_traced_calls().into_iter();
        rank.calls = calls.map(|call| call_record(call, now)).collect();
        rank.shift(offset_to_rank_0(world)?);
        let ranks = objects::gather(world, &rank)?;
        if world.rank() != 0 {
            return Ok(None);
        }
        let mut trace = Trace {
            steps: [first, last],
            notes: notes(&ranks),
            ranks,
            ..Trace::default()
        };
        trace.start_at_zero();
        Ok(Some(trace))
    }
}

/// What the ranks say is missing; each sentence once, with the first rank that says it.
fn notes(ranks: &[RankTrace]) -> Vec<String> {
    let mut said: Vec<(&str, usize, usize)> = Vec::new();
    for rank in ranks {
        for note in &rank.notes {
            match said.iter_mut().find(|(known, ..)| known == note) {
                Some((.., count)) => *count += 1,
                None => said.push((note, rank.rank, 1)),
            }
        }
    }
    let line = |(note, rank, count): (&str, usize, usize)| match count {
        1 => format!("rank {rank}: {note}"),
        count => format!("rank {rank} and {} more: {note}", count - 1),
    };
    said.into_iter().map(line).collect()
}

fn span_record(span: Span) -> SpanRecord {
    let numbers = span.numbers.into_iter();
    SpanRecord {
        name: span.name.to_string(),
        numbers: numbers
            .map(|(name, number)| (name.to_string(), number))
            .collect(),
        start: span.start,
        end: span.end,
    }
}

/// `now` is the end of a call that has not ended yet.
fn call_record(traced: TracedCall, now: u64) -> CallRecord {
    let elements: usize = traced.call.shape.iter().product();
    let group = traced.group.trim_end_matches(" on GPUs");
    CallRecord {
        group: group.to_string(),
        op: traced.call.op.to_string(),
        seq: traced.call.seq,
        dtype: format!("{:?}", traced.call.dtype),
        bytes: (elements * traced.call.dtype.size()) as u64,
        start: ns_of(traced.start),
        end: traced.end.map_or(now, ns_of),
        place: if traced.is_on_gpu {
            CallPlace::Gpu
        } else if traced.thread == thread::current().id() {
            CallPlace::Host
        } else {
            CallPlace::OtherThread
        },
        shape: traced.call.shape,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_notes_of_ranks_are_one_line() {
        let rank = |rank, note: &str| RankTrace {
            rank,
            notes: vec![note.to_string()],
            ..RankTrace::default()
        };
        let ranks = [rank(0, "no CUPTI"), rank(1, "lost"), rank(2, "no CUPTI")];
        assert_eq!(
            notes(&ranks),
            ["rank 0 and 1 more: no CUPTI", "rank 1: lost"]
        );
    }

    #[test]
    fn a_profile_has_the_steps_of_its_window_and_the_clock_costs_no_step() {
        let config = TrainConfig {
            profile: crate::config::ProfileConfig {
                steps: Some("3-4".into()),
            },
            ..TrainConfig::default()
        };
        let world = Group::single(0);
        let spans = Spans::default();
        let device = Device::flex();
        let mut profiler = Profiler::new(&config, spans.clone()).unwrap();
        let mut found = Vec::new();
        for step in 1..=6 {
            let range = profiler.step(step, &world, &device);
            drop(spans.range("forward"));
            drop(range);
            let trace = profiler.finish(step, false, &world).unwrap();
            found.extend(trace.map(|trace| (step, trace)));
        }
        let [(4, trace)] = &found[..] else {
            panic!("one profile, after step 4: {found:?}")
        };
        assert_eq!(trace.steps, [3, 4]);
        let steps: Vec<u64> = trace.ranks[0].steps().map(|(step, _)| step).collect();
        assert_eq!(steps, [3, 4]);
        assert_eq!(trace.ranks[0].spans.len(), 4);

        // A run that ends within the window has a profile of the steps so far.
        let mut profiler = Profiler::new(&config, spans).unwrap();
        drop(profiler.step(3, &world, &device));
        let trace = profiler.finish(3, true, &world).unwrap().unwrap();
        assert_eq!(trace.steps, [3, 3]);
        assert!(profiler.finish(3, true, &world).unwrap().is_none());
    }
}
