//! The named parts of a rank's steps on its host thread.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

/// The start of this process's clock of profiles.
static ORIGIN: OnceLock<Instant> = OnceLock::new();

/// The time on this process's clock of profiles, in nanoseconds; never 0.
pub fn now_ns() -> u64 {
    ns_of(Instant::now())
}

/// A time on this process's clock of profiles, in nanoseconds. Times before the clock's first use
/// are its start.
pub fn ns_of(time: Instant) -> u64 {
    let origin = *ORIGIN.get_or_init(Instant::now);
    let since = time.saturating_duration_since(origin).as_nanos();
    u64::try_from(since).unwrap_or(u64::MAX).max(1)
}

/// A named part of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// What was done.
    pub name: &'static str,
    /// Numbers that say which one it is, such as that of the micro-batch.
    pub numbers: Vec<(&'static str, u64)>,
    /// When it began, as [`now_ns`].
    pub start: u64,
    /// When it ended.
    pub end: u64,
}

/// Records the parts of one rank's steps while a profile of it is taken. Clones record into the
/// same list.
#[derive(Clone, Debug, Default)]
pub struct Spans(Arc<SpanLog>);

#[derive(Debug, Default)]
struct SpanLog {
    is_on: AtomicBool,
    spans: Mutex<Vec<Span>>,
}

impl Spans {
    /// Begins a part of a step, which ends when the returned range is dropped. If no profile is
    /// taken, this costs the load of an atomic number. NVIDIA's profilers see the range in any
    /// case, in a build with feature `nvtx`.
    pub fn range(&self, name: &'static str) -> Range {
        self.numbered(name, || [])
    }

    /// As [`range`](Self::range), with numbers that say which one it is.
    pub fn numbered<const N: usize>(
        &self,
        name: &'static str,
        numbers: impl FnOnce() -> [(&'static str, u64); N],
    ) -> Range {
        let is_on = self.0.is_on.load(Ordering::Relaxed);
        Range {
            #[cfg(feature = "cuda")]
            _range: megaburn_cuda::nvtx::range(name),
            open: is_on.then(|| OpenSpan {
                log: self.0.clone(),
                span: Span {
                    name,
                    numbers: numbers().to_vec(),
                    start: now_ns(),
                    end: 0,
                },
            }),
        }
    }

    /// Begins to record.
    pub fn begin(&self) {
        self.0.lock().clear();
        self.0.is_on.store(true, Ordering::Relaxed);
    }

    /// Whether spans are recorded.
    pub fn is_on(&self) -> bool {
        self.0.is_on.load(Ordering::Relaxed)
    }

    /// Ends the record and returns its spans, in the order of their starts. A span comes before
    /// those inside it.
    pub fn take(&self) -> Vec<Span> {
        self.0.is_on.store(false, Ordering::Relaxed);
        let mut spans = std::mem::take(&mut *self.0.lock());
        // Inner spans end first, so of equal ones the later in the list is the outer one.
        spans.reverse();
        spans.sort_by_key(|span| (span.start, u64::MAX - span.end));
        spans
    }
}

impl SpanLog {
    fn lock(&self) -> MutexGuard<'_, Vec<Span>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A named part of a step, which ends when this is dropped.
#[must_use = "the range ends when this is dropped"]
#[derive(Debug)]
pub struct Range {
    #[cfg(feature = "cuda")]
    _range: megaburn_cuda::nvtx::Range,
    open: Option<OpenSpan>,
}

#[derive(Debug)]
struct OpenSpan {
    log: Arc<SpanLog>,
    span: Span,
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Some(OpenSpan { log, span }) = self.open.take() {
            let end = now_ns();
            log.lock().push(Span { end, ..span });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_recorded_while_a_profile_is_taken() {
        let spans = Spans::default();
        drop(spans.range("before"));
        spans.begin();
        {
            let _step = spans.numbered("step", || [("step", 7)]);
            drop(spans.numbered("forward", || [("chunk", 1), ("micro_batch", 2)]));
            drop(spans.clone().range("backward"));
        }
        let open = spans.range("open");
        let found = spans.take();
        drop((open, spans.range("after")));
        let names: Vec<_> = found.iter().map(|span| span.name).collect();
        assert_eq!(names, ["step", "forward", "backward"]);
        assert_eq!(found[1].numbers, [("chunk", 1), ("micro_batch", 2)]);
        let [step, forward, backward] = &found[..] else {
            panic!("three spans")
        };
        assert!(step.start <= forward.start && forward.end <= backward.start);
        assert!(backward.end <= step.end && step.start > 0);
    }
}
