//! Where the time of the steps of a profile went, over all ranks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    breakdown::{GpuTimes, HostTimes},
    kernels::{KernelClass, base_name},
    trace::{RankTrace, Trace},
};

/// The version of the summary's format, and the key that holds it.
const FORMAT: u64 = 1;
const FORMAT_KEY: &str = "megaburn_profile";
/// The number of kernels that are listed.
const KERNELS: usize = 10;

/// The table of a profile. All times are milliseconds of one step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The version of the format.
    #[serde(rename = "megaburn_profile")]
    pub format: u64,
    /// The first and the last step.
    pub steps: [u64; 2],
    /// The layout.
    pub layout: String,
    /// Each rank's times, the means over the steps.
    pub ranks: Vec<RankTimes>,
    /// The median of the ranks, of each number. Its `rank` has no meaning.
    pub median: RankTimes,
    /// The rank that works the longest, and so waits the least, if there are several.
    pub slowest_rank: Option<usize>,
    /// The kernels with the most time; the means over ranks and steps.
    pub kernels: Vec<KernelTime>,
    /// What is missing, and why.
    pub notes: Vec<String>,
}

/// The times of one rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankTimes {
    /// The rank.
    pub rank: usize,
    /// Its host.
    pub host_name: String,
    /// The time of a step.
    pub step: f64,
    /// What its host thread did.
    pub host: HostTimes,
    /// What its GPU did; absent if no kernels were recorded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuTimes>,
}

/// The time of the kernels of one name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelTime {
    /// The name, without what differs between variants of a kernel.
    pub name: String,
    /// What it does.
    pub class: KernelClass,
    /// How often a rank launches it in a step.
    pub launches: f64,
    /// How long it runs on a rank in a step.
    pub time: f64,
}

impl RankTimes {
    /// The time of a step in which the rank does not wait for others.
    pub fn work(&self) -> f64 {
        let waits = match &self.gpu {
            Some(gpu) => gpu.exposed + gpu.idle,
            None => self.host.communication,
        };
        self.step - waits
    }

    fn of(rank: &RankTrace) -> Self {
        let classes = classes(rank);
        let steps: Vec<[u64; 2]> = rank.steps().map(|(_, step)| step).collect();
        let length = |[begin, end]: &[u64; 2]| end.saturating_sub(*begin) as f64 / 1e6;
        let host = steps.iter().map(|step| HostTimes::of_step(rank, *step));
        let gpu = steps
            .iter()
            .map(|step| GpuTimes::of_step(rank, &classes, *step));
        Self {
            rank: rank.rank,
            host_name: rank.host.clone(),
            step: steps.iter().map(length).sum::<f64>() / steps.len().max(1) as f64,
            host: combined(&host.collect::<Vec<_>>(), mean),
            gpu: (!rank.gpu.is_empty()).then(|| combined(&gpu.collect::<Vec<_>>(), mean)),
        }
    }
}

impl Summary {
    /// The table of a profile.
    pub fn of(trace: &Trace) -> Self {
        let ranks: Vec<RankTimes> = trace.ranks.iter().map(RankTimes::of).collect();
        let steps: Vec<f64> = ranks.iter().map(|rank| rank.step).collect();
        let host: Vec<HostTimes> = ranks.iter().map(|rank| rank.host).collect();
        let gpu: Vec<GpuTimes> = ranks.iter().filter_map(|rank| rank.gpu).collect();
        let slowest = ranks.iter().max_by(|a, b| a.work().total_cmp(&b.work()));
        Self {
            format: FORMAT,
            steps: trace.steps,
            layout: trace.layout.clone(),
            median: RankTimes {
                rank: 0,
                host_name: String::new(),
                step: median(&steps),
                host: combined(&host, median),
                gpu: (!gpu.is_empty()).then(|| combined(&gpu, median)),
            },
            slowest_rank: slowest.filter(|_| ranks.len() > 1).map(|rank| rank.rank),
            kernels: kernels(trace),
            notes: trace.notes.clone(),
            ranks,
        }
    }

    /// The times of this rank.
    pub fn rank(&self, rank: usize) -> Option<&RankTimes> {
        self.ranks.iter().find(|times| times.rank == rank)
    }

    /// The summary as JSON.
    ///
    /// # Errors
    /// Never: it holds only numbers and text.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self).map(|text| text + "\n")
    }
}

/// Whether `text` is the beginning of a file that has a summary.
pub fn is_summary(text: &str) -> bool {
    let inside = text.trim_start().strip_prefix('{');
    inside.is_some_and(|rest| rest.trim_start().starts_with(&format!("\"{FORMAT_KEY}\":")))
}

fn classes(rank: &RankTrace) -> Vec<KernelClass> {
    rank.names
        .iter()
        .map(|name| KernelClass::of(name))
        .collect()
}

/// The kernels that take the most time in the steps.
fn kernels(trace: &Trace) -> Vec<KernelTime> {
    let mut found: BTreeMap<(&str, KernelClass), [f64; 2]> = BTreeMap::new();
    let mut num_steps = 0;
    for rank in trace.ranks.iter().filter(|rank| !rank.gpu.is_empty()) {
        let classes = classes(rank);
        let steps: Vec<[u64; 2]> = rank.steps().map(|(_, step)| step).collect();
        num_steps += steps.len();
        let in_step = |time: u64| {
            let next = steps.partition_point(|[begin, _]| *begin <= time);
            next > 0 && time < steps[next - 1][1]
        };
        for work in rank
            .gpu
            .iter()
            .filter(|work| !work.is_copy && in_step(work.start))
        {
            let key = (base_name(&rank.names[work.name]), classes[work.name]);
            let [launches, time] = found.entry(key).or_default();
            *launches += 1.0;
            *time += work.end.saturating_sub(work.start) as f64 / 1e6;
        }
    }
    let num_steps = num_steps.max(1) as f64;
    let mut kernels: Vec<KernelTime> = found
        .into_iter()
        .map(|((name, class), [launches, time])| KernelTime {
            name: name.to_string(),
            class,
            launches: launches / num_steps,
            time: time / num_steps,
        })
        .collect();
    kernels.sort_by(|a, b| b.time.total_cmp(&a.time));
    kernels.truncate(KERNELS);
    kernels
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        len if len % 2 == 1 => sorted[len / 2],
        len => (sorted[len / 2 - 1] + sorted[len / 2]) / 2.0,
    }
}

/// Times that consist of parts.
trait Parts: Copy {
    fn to_array(self) -> [f64; 8];
    fn from_array(parts: [f64; 8]) -> Self;
}

impl Parts for HostTimes {
    fn to_array(self) -> [f64; 8] {
        self.parts().map(|(_, time)| time)
    }

    fn from_array(parts: [f64; 8]) -> Self {
        let [
            data,
            forward,
            backward,
            reduce,
            update,
            wait,
            communication,
            other,
        ] = parts;
        Self {
            data,
            forward,
            backward,
            reduce,
            update,
            wait,
            communication,
            other,
        }
    }
}

impl Parts for GpuTimes {
    fn to_array(self) -> [f64; 8] {
        self.parts().map(|(_, time)| time)
    }

    fn from_array(parts: [f64; 8]) -> Self {
        let [
            products,
            attention,
            memory_bound,
            optimizer,
            copies,
            exposed,
            idle,
            host,
        ] = parts;
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

/// Each part of `times`, combined by `how`.
fn combined<T: Parts>(times: &[T], how: impl Fn(&[f64]) -> f64) -> T {
    let arrays: Vec<[f64; 8]> = times.iter().map(|times| times.to_array()).collect();
    T::from_array(std::array::from_fn(|at| {
        let column: Vec<f64> = arrays.iter().map(|parts| parts[at]).collect();
        how(&column)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::trace::{GpuRecord, SpanRecord};

    fn step(number: u64, start: u64, end: u64) -> SpanRecord {
        SpanRecord {
            name: "step".into(),
            numbers: vec![("step".into(), number)],
            start: start * 1_000_000,
            end: end * 1_000_000,
        }
    }

    fn work(name: usize, start: u64, end: u64) -> GpuRecord {
        GpuRecord {
            name,
            start: start * 1_000_000,
            end: end * 1_000_000,
            ..GpuRecord::default()
        }
    }

    #[test]
    fn the_rank_that_waits_least_is_the_slowest_and_kernels_are_summed_by_name() {
        let names = [
            "nvjet_a",
            "ncclDevKernel_x",
            "adamw_kernel_00000001",
            "adamw_kernel_00000002",
        ];
        let rank = |rank, gpu: Vec<GpuRecord>| RankTrace {
            rank,
            spans: vec![step(10, 0, 100), step(11, 100, 200)],
            names: names.map(String::from).to_vec(),
            gpu,
            ..RankTrace::default()
        };
        let trace = Trace {
            steps: [10, 11],
            ranks: vec![
                rank(
                    0,
                    vec![
                        work(0, 0, 60),
                        work(1, 60, 100),
                        work(0, 100, 140),
                        work(1, 140, 190),
                    ],
                ),
                rank(
                    1,
                    vec![
                        work(0, 0, 90),
                        work(1, 90, 100),
                        work(0, 100, 180),
                        work(1, 180, 190),
                    ],
                ),
                rank(
                    2,
                    vec![
                        work(0, 0, 70),
                        work(2, 70, 80),
                        work(3, 180, 190),
                        work(3, 300, 310),
                    ],
                ),
            ],
            ..Trace::default()
        };
        let summary = Summary::of(&trace);
        let gpu: Vec<GpuTimes> = summary.ranks.iter().filter_map(|rank| rank.gpu).collect();
        assert_eq!(
            [gpu[0].products, gpu[0].exposed, gpu[0].host],
            [50.0, 45.0, 5.0]
        );
        assert_eq!(
            [gpu[1].products, gpu[1].exposed, gpu[1].host],
            [85.0, 10.0, 5.0]
        );
        // Rank 2 has no communication: what its GPU does not do is the host's.
        assert_eq!(
            [gpu[2].products, gpu[2].optimizer, gpu[2].host],
            [35.0, 10.0, 55.0]
        );
        assert_eq!(summary.slowest_rank, Some(2));
        assert_eq!(summary.ranks[1].work(), 90.0);
        let median = summary.median.gpu.unwrap();
        assert_eq!([median.products, median.exposed], [50.0, 10.0]);
        assert_eq!(summary.median.step, 100.0);
        let of = |name: &str| {
            summary
                .kernels
                .iter()
                .find(|kernel| kernel.name == name)
                .unwrap()
        };
        // 340 ms in six steps of a rank; the kernel after the last step does not count.
        assert_eq!(
            (of("nvjet_a").time, of("nvjet_a").launches),
            (340.0 / 6.0, 5.0 / 6.0)
        );
        assert_eq!(
            (of("adamw_kernel").time, of("adamw_kernel").launches),
            (20.0 / 6.0, 2.0 / 6.0)
        );
        assert_eq!(summary.kernels[0].name, "nvjet_a");
        let json = summary.to_json().unwrap();
        assert!(is_summary(&json) && !is_summary("{\"steps\": 1}"));
        assert_eq!(serde_json::from_str::<Summary>(&json).unwrap(), summary);
    }
}
