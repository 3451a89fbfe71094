//! Which ranks are stragglers.
//!
//! Steps are compared in windows, by the time of a rank's own work without its waits in collectives.
//! Of the steps of a window the lower quartile counts, because disturbances only add time. A rank is
//! slow in a window if its time is at least 5% above the median of the times of the other ranks that
//! do the same work, and a straggler if it is slow in as many windows in a row as always fit into 50
//! steps. GPUs, which all multiply the same matrices, are compared with all others, in as many
//! windows, but at least four. Where a host has more ranks than cores, a straggler
//! must be 25% slower.
//!
//! Similar: NVIDIA Resiliency Extension's relative scores
//! (`nvidia_resiliency_ext/attribution/straggler`), which also divide medians of a rank by those of
//! its peers, and call a rank with less than 0.7 a straggler.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use super::gpu_times::{GpuTimes, GpuWindows};

/// How much slower a straggler is, as a fraction of the work of the others.
pub(super) const SLOWER: f64 = 0.05;
/// The same where ranks take turns on the cores of their host, which disturbs some more than others.
pub(super) const SLOWER_IN_TURNS: f64 = 0.25;
/// A straggler is named within this number of steps, if they have room for two windows.
pub(super) const STEPS: u64 = 50;
/// Of the times of a window, the one that counts.
const QUICK: f64 = 0.25;
/// The part in which the host of a rank on a GPU only waits for its device.
const WAIT: &str = "wait";

/// The work of a rank in the steps of a window. Times are in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct WindowWork {
    /// The median time of the steps, with waits.
    pub(super) step: f64,
    /// The lower quartile of the time of the rank's own work in a step.
    pub(super) own: f64,
    /// The lower quartile of each part of it.
    pub(super) parts: BTreeMap<String, f64>,
    /// The time that its GPU needs to multiply some matrices, if that was measured.
    pub(super) gpu: Option<f64>,
}

impl WindowWork {
    /// The work in some steps: for each its duration, and the own work of its parts.
    pub(super) fn of(steps: &[(f64, BTreeMap<&'static str, f64>)], gpu: Option<f64>) -> Self {
        let names: BTreeSet<&str> = steps
            .iter()
            .flat_map(|(_, parts)| parts.keys().copied())
            .filter(|name| *name != WAIT)
            .collect();
        let part = |name: &str, (_, parts): &(f64, BTreeMap<&str, f64>)| {
            parts.get(name).copied().unwrap_or_default()
        };
        let parts = names.iter().map(|name| {
            let times = steps.iter().map(|step| part(name, step));
            (name.to_string(), quantile(times.collect(), QUICK))
        });
        let total = |step| names.iter().map(|name| part(name, step)).sum();
        Self {
            step: quantile(steps.iter().map(|step| step.0).collect(), 0.5),
            own: quantile(steps.iter().map(total).collect(), QUICK),
            parts: parts.collect(),
            gpu,
        }
    }
}

/// A rank that is slower than the others.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Straggler {
    pub(crate) rank: usize,
    /// The part of its work that takes most of the additional time.
    pub(crate) part: String,
    /// How much longer its work takes, as a fraction.
    pub(crate) slower: f64,
}

/// The windows of all ranks.
#[derive(Debug)]
pub(super) struct Comparison {
    /// By rank: ranks with equal numbers do the same work.
    work: Vec<u64>,
    has_gpus: bool,
    /// How much slower a straggler is, as a fraction.
    slower: f64,
    /// The number of windows that always fit into [`STEPS`] steps.
    num_windows: usize,
    windows: VecDeque<Vec<WindowWork>>,
    gpus: GpuWindows,
    named: BTreeSet<(usize, bool)>,
}

impl Comparison {
    /// For ranks with these numbers of the work that they do, which are compared every `interval`
    /// steps.
    pub(super) fn new(work: Vec<u64>, has_gpus: bool, interval: u64) -> Self {
        // A rank may become slow within a window, which then does not count.
        let num_windows = ((STEPS + 1) / interval.max(1)).saturating_sub(1).max(2) as usize;
        Self {
            gpus: GpuWindows::new(work.len(), num_windows.max(4)),
            work,
            has_gpus,
            slower: SLOWER,
            num_windows,
            windows: VecDeque::new(),
            named: BTreeSet::new(),
        }
    }

    /// Sets how much slower a straggler is, as a fraction.
    pub(super) fn with_slower(self, slower: f64) -> Self {
        Self { slower, ..self }
    }

    /// Adds a window, which has the work of each rank, and returns the ranks that have not been
    /// named before.
    pub(super) fn add(&mut self, window: Vec<WindowWork>) -> Vec<Straggler> {
        if self.windows.len() == self.num_windows {
            self.windows.pop_front();
        }
        self.gpus.add(window.iter().map(|work| work.gpu));
        self.windows.push_back(window);
        if self.windows.len() < self.num_windows {
            return Vec::new();
        }
        let mut found = Vec::new();
        for rank in 0..self.work.len() {
            for is_gpu in [false, true] {
                if self.is_slow(rank, is_gpu) && self.named.insert((rank, is_gpu)) {
                    found.push(self.described(rank, is_gpu));
                }
            }
        }
        found
    }

    fn is_slow(&self, rank: usize, is_gpu: bool) -> bool {
        let is_slow = |excess: Option<f64>| excess.is_some_and(|excess| excess >= self.slower);
        if is_gpu {
            let is_slow = |window| is_slow(excess_of_gpu(window, rank));
            return self
                .gpus
                .last()
                .is_some_and(|last| last.iter().all(is_slow));
        }
        let is_slow = |window: &Vec<WindowWork>| is_slow(self.excess(window, rank));
        self.windows.iter().all(is_slow)
    }

    /// How much more a rank's own work takes than the median of the others, as a fraction.
    fn excess(&self, window: &[WindowWork], rank: usize) -> Option<f64> {
        let others: Vec<f64> = self.others(rank).map(|other| window[other].own).collect();
        // The host of a GPU also waits where it reads numbers from the device, so that of two ranks the
        // one that waits for the other would be named.
        let least = if self.has_gpus { 2 } else { 1 };
        if others.len() < least {
            return None;
        }
        let median = quantile(others, 0.5);
        // The host of a GPU only enqueues work, which matters in proportion to the step.
        let whole = if self.has_gpus {
            window[rank].step
        } else {
            median
        };
        (whole > 0.0).then(|| (window[rank].own - median) / whole)
    }

    /// The other ranks that do the same work.
    fn others(&self, rank: usize) -> impl Iterator<Item = usize> {
        (0..self.work.len())
            .filter(move |other| *other != rank && self.work[*other] == self.work[rank])
    }

    /// What is slow about a rank, over all windows.
    fn described(&self, rank: usize, is_gpu: bool) -> Straggler {
        let over_windows = |excess: &dyn Fn(&Vec<WindowWork>) -> Option<f64>| {
            quantile(self.windows.iter().filter_map(excess).collect(), 0.5)
        };
        if is_gpu {
            let windows = self.gpus.last().into_iter().flatten();
            let excess = windows.filter_map(|window| excess_of_gpu(window, rank));
            return Straggler {
                rank,
                part: "GPU".into(),
                slower: quantile(excess.collect(), 0.5),
            };
        }
        let time_of = |work: &WindowWork, name: &str| work.parts.get(name).copied();
        let more = |window: &Vec<WindowWork>, name: &str| {
            let own = time_of(&window[rank], name)?;
            let others = self.others(rank);
            let others = others.map(|other| time_of(&window[other], name).unwrap_or_default());
            Some(own - quantile(others.collect(), 0.5))
        };
        let names: BTreeSet<&String> = self
            .windows
            .iter()
            .flat_map(|window| window[rank].parts.keys())
            .collect();
        let more = names
            .into_iter()
            .map(|name| (over_windows(&|window| more(window, name)), name));
        let most = more.max_by(|a, b| a.0.total_cmp(&b.0));
        Straggler {
            rank,
            part: most.map_or_else(String::new, |(_, name)| name.clone()),
            slower: over_windows(&|window| self.excess(window, rank)),
        }
    }
}

/// How much longer a rank's GPU takes than the median of all others, as a fraction.
fn excess_of_gpu(window: &GpuTimes, rank: usize) -> Option<f64> {
    let others = window.iter().enumerate();
    let others = others.filter_map(|(other, time)| time.filter(|_| other != rank));
    let others: Vec<f64> = others.collect();
    let own = window[rank]?;
    (!others.is_empty()).then(|| own / quantile(others, 0.5) - 1.0)
}

/// The value below which `part` of the values are; the mean of the two middle ones for the median of
/// an even number. 0 without values.
pub(super) fn quantile(mut values: Vec<f64>, part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else {
        return 0.0;
    };
    let at = part * last as f64;
    let [below, above] = [at.floor(), at.ceil()].map(|at| values[at as usize]);
    below + (above - below) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A window in which each rank has worked this long in `data` and in `forward`, with some noise.
    fn window(ranks: &[[f64; 2]], noise: impl Fn(usize, usize) -> f64) -> Vec<WindowWork> {
        let work = |(rank, [data, forward]): (usize, &[f64; 2])| {
            let steps = (0..10).map(|step| {
                let factor = noise(rank, step);
                let parts = [
                    ("data", data * factor),
                    ("forward", forward * factor),
                    (WAIT, 9.0),
                ];
                (20.0, parts.into_iter().collect())
            });
            WindowWork::of(&steps.collect::<Vec<_>>(), None)
        };
        ranks.iter().enumerate().map(work).collect()
    }

    fn found(work: &[u64], windows: &[Vec<WindowWork>], has_gpus: bool) -> Vec<Vec<Straggler>> {
        let mut comparison = Comparison::new(work.to_vec(), has_gpus, 10);
        windows
            .iter()
            .map(|window| comparison.add(window.clone()))
            .collect()
    }

    const EVEN: [[f64; 2]; 4] = [[1.0, 9.0]; 4];

    #[test]
    fn a_rank_that_is_slower_is_named_once_within_50_steps_with_its_part() {
        for (slow, part) in [([2.0, 9.0], "data"), ([1.0, 10.0], "forward")] {
            let ranks = [EVEN[0], EVEN[1], slow, EVEN[3]];
            let noise = |rank: usize, step: usize| 1.0 + ((7 * rank + 3 * step) % 5) as f64 * 0.01;
            let [even, late] = [&EVEN, &ranks].map(|ranks| window(ranks, noise));
            let windows = [vec![even; 5], vec![late; 10]].concat();
            let found = found(&[0; 4], &windows, false);
            let named: Vec<_> = found
                .iter()
                .enumerate()
                .filter(|it| !it.1.is_empty())
                .collect();
            let [(8, stragglers)] = named[..] else {
                panic!("once, after four slow windows: {named:?}")
            };
            assert_eq!((stragglers[0].rank, stragglers[0].part.as_str()), (2, part));
            assert!((stragglers[0].slower - 0.1).abs() < 0.03, "{stragglers:?}");
        }
    }

    #[test]
    fn ranks_that_are_alike_or_slow_now_and_then_are_not_named() {
        // Each is slow in a third of its steps, at other times than the others.
        let noise =
            |rank: usize, step: usize| 1.0 + 0.5 * f64::from((rank + step).is_multiple_of(3));
        let noisy = window(&EVEN, noise);
        let often = window(&[EVEN[0], EVEN[1], [5.0, 9.0]], |_, _| 1.0);
        let even = window(&EVEN[..3], |_, _| 1.0);
        let alternating: Vec<_> = (0..20)
            .map(|at| {
                if at % 2 == 0 {
                    often.clone()
                } else {
                    even.clone()
                }
            })
            .collect();
        let less = window(&[EVEN[0], [1.0, 9.4]], |_, _| 1.0);
        for (ranks, windows) in [(4, vec![noisy; 20]), (3, alternating), (2, vec![less; 20])] {
            let found = found(&vec![0; ranks], &windows, false);
            assert!(found.iter().all(Vec::is_empty), "{found:?}");
        }
    }

    #[test]
    fn ranks_that_take_turns_on_cores_must_be_much_slower() {
        for (data, is_named) in [(2.0, false), (4.0, true)] {
            let ranks = [EVEN[0], [data, 9.0], EVEN[2]];
            let mut comparison =
                Comparison::new(vec![0; 3], false, 10).with_slower(SLOWER_IN_TURNS);
            let windows = (0..6).map(|_| comparison.add(window(&ranks, |_, _| 1.0)));
            assert_eq!(windows.flatten().count(), usize::from(is_named));
        }
    }

    #[test]
    fn only_ranks_with_the_same_work_are_compared() {
        let windows = vec![
            window(
                &[[1.0, 9.0], [1.0, 19.0], [1.0, 9.0], [1.0, 19.0]],
                |_, _| 1.0
            );
            6
        ];
        assert!(found(&[0, 1, 0, 1], &windows, false).concat().is_empty());
        assert_eq!(found(&[0; 4], &windows, false).concat().len(), 2);
    }

    #[test]
    fn the_host_of_a_gpu_is_slow_in_proportion_to_the_step() {
        // A step takes 20 s, and 0.3 s more of enqueueing do not matter.
        let of = |data| vec![window(&[[1.0, 1.0], [1.0, 1.0], [data, 1.0]], |_, _| 1.0); 6];
        assert!(found(&[0; 3], &of(1.3), true).concat().is_empty());
        assert_eq!(found(&[0; 3], &of(2.5), true).concat()[0].rank, 2);
    }

    #[test]
    fn a_gpu_is_compared_with_all_others() {
        let work = |gpu| WindowWork {
            gpu: Some(gpu),
            ..WindowWork::default()
        };
        let window = [1.0, 1.01, 0.99, 1.08].map(work).to_vec();
        let without = vec![WindowWork::default(); 4];
        // Where steps are short, GPUs measure less often.
        let often = vec![window.clone(); 6];
        let seldom = vec![[without, window]; 6].concat();
        for windows in [often, seldom] {
            let found = found(&[0, 1, 2, 3], &windows, true).concat();
            assert_eq!(
                (found[0].rank, found[0].part.as_str(), found.len()),
                (3, "GPU", 1)
            );
        }
        let two = [1.0, 1.08].map(work).to_vec();
        assert_eq!(found(&[0, 0], &vec![two; 6], true).concat()[0].rank, 1);
    }
}
