//! The kernels of a rank's GPU while a profile is taken.

use burn::prelude::Device;
use megaburn_report::profile::RankTrace;

/// The record of the kernels of a rank's GPU; nothing on a CPU.
#[derive(Debug, Default)]
pub(super) struct DeviceTrace {
    #[cfg(feature = "cuda")]
    trace: Option<cuda::Recording>,
    /// Why kernels are not recorded.
    note: Option<String>,
}

impl DeviceTrace {
    /// Begins to record the kernels of `device`. If that is not possible, the profile says why.
    #[cfg(feature = "cuda")]
    pub(super) fn begin(device: &Device) -> Self {
        match cuda::Recording::begin(device) {
            Ok(trace) => Self { trace, note: None },
            Err(error) => Self {
                trace: None,
                note: Some(format!("no kernels are recorded: {error}")),
            },
        }
    }

    /// There are no kernels to record on a CPU.
    #[cfg(not(feature = "cuda"))]
    pub(super) fn begin(_: &Device) -> Self {
        Self::default()
    }

    /// Waits for the device, and adds what it did.
    pub(super) fn finish(self, rank: &mut RankTrace) {
        rank.notes.extend(self.note);
        #[cfg(feature = "cuda")]
        if let Some(trace) = self.trace {
            trace.finish(rank);
        }
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::collections::HashMap;

    use burn::prelude::Device;
    use megaburn_cuda::{
        CudaError, CudaQueue,
        cupti::{GpuTrace, WorkKind},
    };
    use megaburn_report::profile::{GpuRecord, RankTrace, now_ns};

    #[derive(Debug)]
    pub(super) struct Recording {
        queue: CudaQueue,
        trace: GpuTrace,
    }

    impl Recording {
        /// `None` if the device is not a GPU.
        pub(super) fn begin(device: &Device) -> Result<Option<Self>, CudaError> {
            let Some(queue) = CudaQueue::for_device(device) else {
                return Ok(None);
            };
            let trace = GpuTrace::begin(now_ns)?;
            Ok(Some(Self { queue, trace }))
        }

        pub(super) fn finish(self, rank: &mut RankTrace) {
            self.queue.flush();
            let activity = match self.trace.finish(&self.queue) {
                Ok(activity) => activity,
                Err(error) => {
                    let note = format!("the kernels that were recorded are lost: {error}");
                    return rank.notes.push(note);
                }
            };
            if activity.dropped > 0 {
                let dropped = activity.dropped;
                rank.notes.push(format!(
                    "CUPTI had no room for {dropped} kernels or copies: profile fewer steps"
                ));
            }
            let mut numbers = HashMap::new();
            for work in activity.work {
                let next = numbers.len();
                let name = *numbers.entry(work.name.clone()).or_insert_with(|| {
                    rank.names.push(work.name.to_string());
                    next
                });
                rank.gpu.push(GpuRecord {
                    name,
                    is_copy: work.kind != WorkKind::Kernel,
                    stream: work.stream,
                    bytes: work.bytes,
                    start: work.start,
                    end: work.end,
                });
            }
        }
    }
}
