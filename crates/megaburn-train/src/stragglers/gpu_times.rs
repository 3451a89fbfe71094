//! The newest times that GPUs need for the same products.

use std::collections::VecDeque;

/// For each rank the time of its GPU, if it has measured one.
pub(super) type GpuTimes = Vec<Option<f64>>;

/// Completes windows of times. Each rank measures by its own clock, so that one may measure an
/// interval later than the others.
#[derive(Debug)]
pub(super) struct GpuWindows {
    newest: GpuTimes,
    /// The ranks that have ever measured.
    measures: Vec<bool>,
    most: usize,
    windows: VecDeque<GpuTimes>,
}

impl GpuWindows {
    /// For `num_ranks` ranks, of whose windows the last `most` are kept.
    pub(super) fn new(num_ranks: usize, most: usize) -> Self {
        Self {
            newest: vec![None; num_ranks],
            measures: vec![false; num_ranks],
            most,
            windows: VecDeque::new(),
        }
    }

    /// Adds what ranks have measured since the last call.
    pub(super) fn add(&mut self, times: impl IntoIterator<Item = Option<f64>>) {
        let times: GpuTimes = times.into_iter().collect();
        let has_both = |(new, old): (&Option<f64>, &Option<f64>)| new.is_some() && old.is_some();
        if times.iter().zip(&self.newest).any(has_both) {
            self.complete();
        }
        for (rank, time) in times.into_iter().enumerate() {
            self.measures[rank] |= time.is_some();
            self.newest[rank] = time.or(self.newest[rank]);
        }
        let is_missing = |(time, measures): (&Option<f64>, &bool)| *measures && time.is_none();
        if !self.newest.iter().zip(&self.measures).any(is_missing) {
            self.complete();
        }
    }

    /// The last windows, if there are as many as are kept.
    pub(super) fn last(&self) -> Option<&VecDeque<GpuTimes>> {
        (self.windows.len() == self.most).then_some(&self.windows)
    }

    fn complete(&mut self) {
        let next = vec![None; self.newest.len()];
        let window = std::mem::replace(&mut self.newest, next);
        if window.iter().all(Option::is_none) {
            return;
        }
        if self.windows.len() == self.most {
            self.windows.pop_front();
        }
        self.windows.push_back(window);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_measures_later_than_the_others_is_in_their_windows() {
        let mut windows = GpuWindows::new(3, 2);
        // The third rank never measures.
        windows.add([Some(1.0), Some(2.0), None]);
        for _ in 0..2 {
            windows.add([None; 3]);
            windows.add([Some(1.5), None, None]);
            windows.add([None, Some(2.5), None]);
        }
        assert_eq!(windows.last().unwrap(), &[[Some(1.5), Some(2.5), None]; 2]);
    }

    #[test]
    fn a_rank_that_stops_measuring_does_not_stop_the_others() {
        let mut windows = GpuWindows::new(2, 2);
        windows.add([Some(1.0), Some(2.0)]);
        assert_eq!(windows.last(), None);
        windows.add([Some(1.0), None]);
        windows.add([Some(1.0), None]);
        assert_eq!(windows.last().unwrap()[1], [Some(1.0), None]);
    }
}
