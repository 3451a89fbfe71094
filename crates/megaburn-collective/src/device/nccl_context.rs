//! The GPU state that all groups of a rank share.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
    time::Instant,
};

use megaburn_cuda::{
    CudaError,
    nccl::{self, Communicator, Observer, PollThread},
};

use super::{
    watchdog::{GroupStatus, Groups, Watchdog},
    watched::Watched,
};
use crate::{clock, rank_context::RankContext};

/// The rank of this process that uses a GPU.
static OWNER: Mutex<Weak<()>> = Mutex::new(Weak::new());

/// The watchdog of a rank and the groups that it watches.
#[derive(Debug, Default)]
pub(crate) struct NcclContext {
    watchdog: OnceLock<Result<PollThread, CudaError>>,
    groups: Groups,
    rank: Arc<()>,
}

impl RankContext {
    /// Claims the GPU for this rank; only one rank per process may use a GPU.
    ///
    /// # Errors
    /// Another rank of this process has claimed it.
    pub(super) fn claim_gpu(&self) -> Result<(), String> {
        let mut owner = OWNER.lock().unwrap_or_else(PoisonError::into_inner);
        match owner.upgrade() {
            Some(other) if !Arc::ptr_eq(&other, &self.device.rank) => Err(
                "another rank of this process already uses a GPU. NCCL needs one process per \
                GPU: start them with `megaburn launch --nproc N -- COMMAND`, torchrun or srun; \
                rank threads are for the CPU"
                    .into(),
            ),
            _ => {
                *owner = Arc::downgrade(&self.device.rank);
                Ok(())
            }
        }
    }

    /// Starts watching a group's calls.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub(super) fn watch(
        &self,
        group: &Arc<Watched>,
        communicator: &Communicator,
    ) -> Result<(), CudaError> {
        let NcclContext {
            watchdog, groups, ..
        } = &self.device;
        let watchdog = watchdog.get_or_init(|| {
            let transport = self.transport.clone();
            let recorder = self.recorder.clone();
            let watch = Watchdog::new(transport, recorder, self.failure.clone(), groups.clone());
            PollThread::start(WatchObserver {
                watch,
                oldest: HashMap::new(),
            })
        });
        let watchdog = watchdog.as_ref().map_err(Clone::clone)?;
        groups
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(group.clone());
        watchdog.watch(group.channel, communicator);
        Ok(())
    }

    /// Stops watching a group whose communicator is closed.
    pub(super) fn unwatch(&self, group: &Arc<Watched>) {
        let mut groups = self
            .device
            .groups
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        groups.retain(|watched| !Arc::ptr_eq(watched, group));
    }
}

struct WatchObserver {
    watch: Watchdog,
    /// By group: the oldest call, and when it was first seen, on the clock that limits are measured
    /// with.
    oldest: HashMap<u64, (u64, Instant)>,
}

impl Observer for WatchObserver {
    fn look(&mut self, standings: &[nccl::GroupStatus]) -> Option<String> {
        let now = clock::now();
        let mut standings: Vec<_> = standings.iter().cloned().map(GroupStatus::from).collect();
        for GroupStatus { key, oldest, .. } in &mut standings {
            let Some((id, made)) = oldest else { continue };
            let seen = self.oldest.entry(*key).or_insert((*id, now));
            if seen.0 != *id {
                *seen = (*id, now);
            }
            *made = seen.1;
        }
        self.watch.look(now, &standings)
    }
}

impl From<nccl::GroupStatus> for GroupStatus {
    fn from(from: nccl::GroupStatus) -> Self {
        let nccl::GroupStatus {
            key,
            finished,
            oldest,
            fault,
        } = from;
        Self {
            key,
            finished,
            oldest,
            fault,
        }
    }
}
