//! The thread that reads a rank's GPU.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use megaburn_doctor::{GpuHealth, HealthEvent, HealthWatch};

/// The newest reading of a GPU, and the events since they were taken.
#[derive(Debug, Default)]
struct Readings {
    watch: HealthWatch,
    last: Option<GpuHealth>,
    events: Vec<HealthEvent>,
}

/// A thread that reads a GPU until this is dropped.
#[derive(Debug)]
pub(super) struct GpuWatch {
    readings: Arc<Mutex<Readings>>,
    is_over: Arc<AtomicBool>,
}

impl GpuWatch {
    /// Watches the GPU with this number in the process. `None` if the system cannot start a thread.
    pub(super) fn start(rank: usize, index: usize) -> Option<Self> {
        Self::start_with(rank, move |is_over, observe| {
            read_gpu(index, is_over, observe)
        })
    }

    /// Watches what `read` observes until its first argument says that it is over. That it cannot is
    /// a warning of rank 0.
    fn start_with(
        rank: usize,
        read: impl FnOnce(&dyn Fn() -> bool, &mut dyn FnMut(GpuHealth)) -> Result<(), String>
        + Send
        + 'static,
    ) -> Option<Self> {
        let readings = Arc::new(Mutex::new(Readings::default()));
        let is_over = Arc::new(AtomicBool::new(false));
        let (own, over) = (readings.clone(), is_over.clone());
        let watch = move || {
            let is_over = || over.load(Ordering::Relaxed);
            let found = read(&is_over, &mut |health| observe(&own, rank, health));
            if let Err(why) = found
                && rank == 0
            {
                tracing::warn!("the health of GPUs is not watched: {why}");
            }
        };
        let thread = thread::Builder::new()
            .name("gpu-health".into())
            .spawn(watch);
        thread.ok()?;
        Some(Self { readings, is_over })
    }

    /// The newest reading, and the events since the last call.
    pub(super) fn take(&self) -> (Option<GpuHealth>, Vec<HealthEvent>) {
        let mut readings = lock(&self.readings);
        (readings.last.clone(), std::mem::take(&mut readings.events))
    }
}

impl Drop for GpuWatch {
    /// Does not wait for the thread: it may be in a call of the driver of a GPU that has failed.
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// Reads the GPU with this number in the process.
#[cfg(feature = "cuda")]
fn read_gpu(
    index: usize,
    is_over: &dyn Fn() -> bool,
    observe: &mut dyn FnMut(GpuHealth),
) -> Result<(), String> {
    /// How often the GPU is read.
    const INTERVAL: std::time::Duration = std::time::Duration::from_secs(10);
    let address = megaburn_cuda::libraries::gpu_pci_address(index);
    let address = address.ok_or("the address of the GPU is unknown")?;
    megaburn_doctor::watch_health(&address, INTERVAL, is_over, observe)
        .map_err(|why| format!("NVML cannot be used: {why}"))
}

/// There are no GPUs in this build.
#[cfg(not(feature = "cuda"))]
fn read_gpu(_: usize, _: &dyn Fn() -> bool, _: &mut dyn FnMut(GpuHealth)) -> Result<(), String> {
    Err("this build has no GPUs".into())
}

/// Adds a reading, and warns of what deserves it.
fn observe(readings: &Mutex<Readings>, rank: usize, health: GpuHealth) {
    let mut readings = lock(readings);
    let events = readings.watch.observe(&health);
    for event in &events {
        tracing::warn!("rank {rank}: GPU: {event}");
    }
    readings.events.extend(events);
    readings.last = Some(health);
}

fn lock(readings: &Mutex<Readings>) -> MutexGuard<'_, Readings> {
    readings.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn events_are_taken_once_and_the_reading_stays_until_the_watch_is_over() {
        let health = |xids: &[u64]| GpuHealth {
            temperature_celsius: Some(70),
            xids: xids.to_vec(),
            ..GpuHealth::default()
        };
        let (read, was_read) = mpsc::channel();
        let watch = GpuWatch::start_with(3, move |is_over, observe| {
            observe(health(&[79]));
            observe(health(&[]));
            read.send(()).unwrap();
            while !is_over() {
                thread::yield_now();
            }
            read.send(()).unwrap();
            Ok(())
        })
        .unwrap();
        was_read.recv().unwrap();
        assert_eq!(
            watch.take(),
            (Some(health(&[])), vec![HealthEvent::Xid(79)])
        );
        assert_eq!(watch.take(), (Some(health(&[])), vec![]));
        drop(watch);
        was_read.recv().expect("the thread ends");
    }
}
