//! What kind of failure an error is: its exit code, and whether all ranks share it.

use std::io;

use megaburn_checkpoint::CheckpointError;
use megaburn_collective::CollectiveError;
use megaburn_models::ModelError;
use megaburn_optim::OptimError;
use megaburn_store::{Obstacle, StoreError};

use super::TrainError;
use crate::exit::Exit;

impl TrainError {
    /// Whether all ranks end with this error, at the same point of the run.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(
            self,
            Self::NonFinite { .. }
                | Self::LossSpike { .. }
                | Self::NoRollback { .. }
                | Self::NonFiniteWeights { .. }
                | Self::TooManySkippedSteps { .. }
                | Self::ReplicasDiffer { .. }
                | Self::StateChanged { .. }
        )
    }

    /// The step whose checkpoint may hold wrong values. `compared` is the last step whose state all
    /// ranks have compared: no later checkpoint exists.
    pub(crate) fn suspect_step(&self, compared: u64) -> Option<u64> {
        // The state changed after it was compared, and its checkpoint may have been written since.
        matches!(self, Self::StateChanged { .. }).then_some(compared)
    }

    /// The exit code of a process that fails with this error.
    pub fn exit(&self) -> Exit {
        match self {
            Self::UnknownKey { .. }
            | Self::Task(_)
            | Self::RemovedKey { .. }
            | Self::WrongType { .. }
            | Self::Value { .. }
            | Self::Toml { .. }
            | Self::Set { .. }
            | Self::Invalid { .. }
            | Self::Layout(_)
            | Self::Pipeline(_)
            | Self::Ranks { .. }
            | Self::OtherThanInit { .. }
            | Self::Read { .. } => Exit::BadInput,
            Self::Report(error) if error.is_bad_input() => Exit::BadInput,
            Self::RunFolder(error) => error.exit(),
            Self::Write { .. } | Self::Report(_) | Self::Signals { .. } => Exit::Failed,
            Self::Save { source, .. } if source.is_not_finite() => Exit::NonFinite,
            Self::NonFinite { .. }
            | Self::LossSpike { .. }
            | Self::NoRollback { .. }
            | Self::NonFiniteWeights { .. }
            | Self::TooManySkippedSteps { .. } => Exit::NonFinite,
            // Not a peer's, so that a launcher counts the failure against the host of this rank only.
            Self::ReplicasDiffer { is_own: true, .. } | Self::StateChanged { is_own: true, .. } => {
                Exit::Failed
            }
            Self::ReplicasDiffer { .. } | Self::StateChanged { .. } | Self::Disagrees { .. } => {
                Exit::PeerLost
            }
            Self::RanksUnderLauncher { .. }
            | Self::NotOnFewerRanks { .. }
            | Self::TooFewGpus { .. }
            | Self::NoGpuToShare
            | Self::NoGpuForRank { .. }
            | Self::GpuThreads { .. }
            | Self::Cuda { .. }
            | Self::Launch { .. }
            | Self::OtherConfig { .. }
            | Self::StoredRun { .. }
            | Self::Resume(_)
            | Self::Megatron(_)
            | Self::Data(_) => Exit::BadInput,
            Self::NoThread { .. }
            | Self::RankPanicked { .. }
            | Self::OutOfMemory { .. }
            | Self::Device { .. } => Exit::Failed,
            Self::Model(ModelError::Checkpoint(error)) | Self::Checkpoint(error)
                if is_bad_input(error) =>
            {
                Exit::BadInput
            }
            Self::Model(ModelError::Checkpoint(_)) => Exit::Failed,
            Self::Model(_) => Exit::BadInput,
            Self::Collective(_)
            | Self::Optim(_)
            | Self::Checkpoint(_)
            | Self::Save { .. }
            | Self::Upload { .. } => {
                match self.collective() {
                    Some(
                        CollectiveError::BadEnvironment { .. }
                        | CollectiveError::AddressInUse { .. },
                    ) => Exit::BadInput,
                    Some(
                        CollectiveError::BadArgument { .. } | CollectiveError::BadGroup { .. },
                    ) => Exit::Failed,
                    // Exit with the code of the rank that could not start.
                    Some(CollectiveError::CannotStart { code, .. }) => {
                        Exit::of_code(*code).unwrap_or(Exit::PeerLost)
                    }
                    Some(_) => Exit::PeerLost,
                    None => Exit::Failed,
                }
            }
        }
    }

    /// The error of the failed collective, if one caused this error.
    pub fn collective(&self) -> Option<&CollectiveError> {
        match self {
            Self::Collective(error) => Some(error),
            Self::Optim(OptimError::Collective(error))
            | Self::Checkpoint(CheckpointError::Collective(error)) => Some(error),
            Self::Save { source, .. } | Self::Upload { source, .. } => match &**source {
                CheckpointError::Collective(error) => Some(error),
                _ => None,
            },
            _ => None,
        }
    }
}

/// Whether a checkpoint error is caused by what the user passed, and not by damage or the system.
fn is_bad_input(error: &CheckpointError) -> bool {
    match error {
        CheckpointError::Io { source, .. } => matches!(
            source.kind(),
            io::ErrorKind::NotFound
                | io::ErrorKind::NotADirectory
                | io::ErrorKind::IsADirectory
                | io::ErrorKind::PermissionDenied
        ),
        CheckpointError::Peer { .. }
        | CheckpointError::Collective(_)
        | CheckpointError::Unreadable { .. }
        | CheckpointError::NotEverywhere { .. }
        | CheckpointError::Guarded { .. }
        | CheckpointError::Source { .. }
        | CheckpointError::LocalShape { .. }
        | CheckpointError::NotDurable { .. }
        | CheckpointError::Untiled { .. } => false,
        CheckpointError::Store(error) => match error {
            StoreError::File { .. } | StoreError::Cancelled { .. } | StoreError::Changed { .. } => {
                false
            }
            StoreError::Object { obstacle, .. } => *obstacle != Obstacle::Other,
            _ => true,
        },
        _ => true,
    }
}
