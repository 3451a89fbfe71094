//! Where the time of a rank's steps went, on its host thread and on its GPU. The parts of a step
//! add up to its time.

use serde::{Deserialize, Serialize};

use super::{
    kernels::KernelClass,
    trace::{CallPlace, RankTrace},
};

/// Milliseconds of a step by what the rank's host thread did. On a GPU it only enqueues, and
/// [`wait`](Self::wait) is the time that it waits for the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostTimes {
    /// Reading samples and building micro-batches.
    pub data: f64,
    /// Forward passes.
    pub forward: f64,
    /// Backward passes.
    pub backward: f64,
    /// Sums over ranks and norms of gradients, without the collectives.
    pub reduce: f64,
    /// The update of the weights.
    pub update: f64,
    /// Waiting for the GPU.
    pub wait: f64,
    /// Waiting in collectives for other ranks.
    pub communication: f64,
    /// Everything else.
    pub other: f64,
}

impl HostTimes {
    /// The names and the values of the parts.
    pub fn parts(&self) -> [(&'static str, f64); 8] {
        [
            ("data", self.data),
            ("forward", self.forward),
            ("backward", self.backward),
            ("reduce", self.reduce),
            ("update", self.update),
            ("wait", self.wait),
            ("communication", self.communication),
            ("other", self.other),
        ]
    }

    /// The part that a span or a collective belongs to.
    fn part(&mut self, name: &str) -> &mut f64 {
        match name {
            "data" => &mut self.data,
            "forward" => &mut self.forward,
            "backward" => &mut self.backward,
            "reduce" => &mut self.reduce,
            "update" => &mut self.update,
            "wait" => &mut self.wait,
            CALL => &mut self.communication,
            _ => &mut self.other,
        }
    }

    /// The times in a step of this rank, from when it began until it ended.
    pub(super) fn of_step(rank: &RankTrace, [begin, end]: [u64; 2]) -> Self {
        let spans = rank.spans.iter();
        let spans = spans.map(|span| (span.start, span.end, span.name.as_str()));
        let calls = rank
            .calls
            .iter()
            .filter(|call| call.place == CallPlace::Host);
        let calls = calls.map(|call| (call.start, call.end, CALL));
        let mut inside: Vec<_> = spans
            .chain(calls)
            .filter(|(start, stop, _)| *start >= begin && *stop <= end)
            .collect();
        // An outer part before those inside it; the order of equal ones is that of the lists.
        inside.sort_by_key(|(start, stop, _)| (*start, u64::MAX - *stop));
        let mut times = Self::default();
        let mut open: Vec<(u64, &str)> = Vec::new();
        for (start, stop, name) in inside {
            while open.pop_if(|(ends, _)| *ends <= start).is_some() {}
            let length = millis(start, stop);
            if let Some((_, outer)) = open.last() {
                *times.part(outer) -= length;
            }
            *times.part(name) += length;
            open.push((stop, name));
        }
        times
    }
}

/// The part of collectives.
const CALL: &str = "collective";

/// Milliseconds of a step by what the rank's GPU did. Where several things run at once, the first
/// of these counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuTimes {
    /// Products of matrices.
    pub products: f64,
    /// Fused attention.
    pub attention: f64,
    /// The update of weights, with norms and clipping.
    pub optimizer: f64,
    /// All other kernels that compute.
    pub memory_bound: f64,
    /// Kernels of NCCL while nothing computes.
    pub exposed: f64,
    /// Copies and fills while nothing else runs.
    pub copies: f64,
    /// Nothing, while the rank's thread waits for other ranks.
    pub idle: f64,
    /// Nothing, because the host has not enqueued the next work yet.
    pub host: f64,
}

impl GpuTimes {
    /// The names and the values of the parts.
    pub fn parts(&self) -> [(&'static str, f64); 8] {
        [
            ("products", self.products),
            ("attention", self.attention),
            ("memory-bound", self.memory_bound),
            ("optimizer", self.optimizer),
            ("copies", self.copies),
            ("exposed", self.exposed),
            ("idle", self.idle),
            ("host", self.host),
        ]
    }

    /// The times in a step of this rank, from when it began until it ended.
    pub(super) fn of_step(rank: &RankTrace, classes: &[KernelClass], step: [u64; 2]) -> Self {
        // For each time, which level begins or ends there.
        let mut edges: Vec<(u64, usize, bool)> = Vec::new();
        let mut add = |start: u64, end: u64, level: usize| {
            let [start, end] = [start, end].map(|time| time.clamp(step[0], step[1]));
            if start < end {
                edges.extend([(start, level, true), (end, level, false)]);
            }
        };
        for work in &rank.gpu {
            let class = match work.is_copy {
                true => KernelClass::Copies,
                false => classes[work.name],
            };
            add(work.start, work.end, level(class));
        }
        for call in rank
            .calls
            .iter()
            .filter(|call| call.place == CallPlace::Host)
        {
            add(call.start, call.end, WAITING);
        }
        edges.sort_unstable();
        let mut running = [0usize; WAITING + 1];
        let mut found = [0.0; WAITING + 2];
        let mut last = step[0];
        for (time, level, begins) in edges.into_iter().chain([(step[1], WAITING, true)]) {
            let first = running.iter().position(|running| *running > 0);
            found[first.unwrap_or(WAITING + 1)] += millis(last, time);
            last = time;
            match begins {
                true => running[level] += 1,
                false => running[level] -= 1,
            }
        }
        let [
            products,
            attention,
            optimizer,
            memory_bound,
            exposed,
            copies,
            idle,
            host,
        ] = found;
        Self {
            products,
            attention,
            optimizer,
            memory_bound,
            exposed,
            copies,
            idle,
            host,
        }
    }
}

/// The level of a rank's thread that waits in a collective.
const WAITING: usize = 6;

fn level(class: KernelClass) -> usize {
    match class {
        KernelClass::Products => 0,
        KernelClass::Attention => 1,
        KernelClass::Optimizer => 2,
        KernelClass::MemoryBound => 3,
        KernelClass::Communication => 4,
        KernelClass::Copies => 5,
    }
}

fn millis(start: u64, end: u64) -> f64 {
    end.saturating_sub(start) as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::trace::{CallRecord, GpuRecord, SpanRecord};

    /// Milliseconds as nanoseconds.
    fn ms(millis: u64) -> u64 {
        millis * 1_000_000
    }

    fn span(name: &str, start: u64, end: u64) -> SpanRecord {
        SpanRecord {
            name: name.into(),
            numbers: Vec::new(),
            start: ms(start),
            end: ms(end),
        }
    }

    fn call(start: u64, end: u64, place: CallPlace) -> CallRecord {
        CallRecord {
            start: ms(start),
            end: ms(end),
            place,
            ..CallRecord::default()
        }
    }

    #[test]
    fn parts_of_the_host_are_what_is_inside_nothing_else() {
        let rank = RankTrace {
            spans: vec![
                span("step", 10, 110),
                span("data", 12, 15),
                span("forward", 15, 45),
                span("backward", 45, 85),
                span("reduce", 85, 95),
                span("update", 95, 99),
                span("clip", 100, 101),
                span("step", 200, 300),
            ],
            calls: vec![
                call(20, 30, CallPlace::Host),
                call(86, 94, CallPlace::Host),
                // The host does not wait for these.
                call(50, 60, CallPlace::Gpu),
                call(61, 62, CallPlace::OtherThread),
            ],
            ..RankTrace::default()
        };
        let found = HostTimes::of_step(&rank, [ms(10), ms(110)]);
        let expected = HostTimes {
            data: 3.0,
            forward: 20.0,
            backward: 40.0,
            reduce: 2.0,
            update: 4.0,
            wait: 0.0,
            communication: 18.0,
            // 2 before data, 12 after the update.
            other: 13.0,
        };
        assert_eq!(found, expected);
        assert_eq!(
            found.parts().iter().map(|(_, time)| time).sum::<f64>(),
            100.0
        );
    }

    #[test]
    fn of_what_overlaps_on_a_gpu_the_first_counts() {
        let work = |name, is_copy, start, end| GpuRecord {
            name,
            is_copy,
            start: ms(start),
            end: ms(end),
            ..GpuRecord::default()
        };
        use KernelClass::{Attention, Communication, MemoryBound, Optimizer, Products};
        let classes = [Products, Attention, Optimizer, MemoryBound, Communication];
        let rank = RankTrace {
            gpu: vec![
                // Began before the step.
                work(0, false, 0, 20),
                work(3, false, 15, 25),
                work(1, false, 25, 40),
                // Hidden for 10 of 25 ms.
                work(4, false, 30, 55),
                // Hidden by NCCL for 5 of 10.
                work(0, true, 50, 60),
                work(2, false, 70, 80),
                // Two streams.
                work(0, false, 85, 95),
                work(0, false, 90, 97),
                // Ends after the step.
                work(4, false, 105, 150),
            ],
            calls: vec![
                call(60, 66, CallPlace::Host),
                call(90, 100, CallPlace::Host),
                call(0, 200, CallPlace::Gpu),
            ],
            ..RankTrace::default()
        };
        let found = GpuTimes::of_step(&rank, &classes, [ms(10), ms(110)]);
        let expected = GpuTimes {
            products: 10.0 + 12.0,
            attention: 15.0,
            optimizer: 10.0,
            memory_bound: 5.0,
            exposed: 15.0 + 5.0,
            copies: 5.0,
            // From 60 to 66 and from 97 to 100.
            idle: 9.0,
            // From 66 to 70, 80 to 85 and 100 to 105.
            host: 14.0,
        };
        assert_eq!(found, expected);
        assert_eq!(
            found.parts().iter().map(|(_, time)| time).sum::<f64>(),
            100.0
        );
    }
}
