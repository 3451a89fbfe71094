//! `megaburn checkpoint`: looks into checkpoints, verifies, compares, deletes and converts them.

mod average;
mod diff;
mod fetch;
mod from_megatron;
mod ls;
mod model;
mod pattern;
mod place;
mod progress;
mod prune;
mod reshard;
mod show;
mod state_keys;
mod stats;
mod stored;
mod table;
mod tensor_table;
mod to_megatron;
mod units;
mod verify;
mod weights;

use std::process::ExitCode;

pub(super) use model::describe;
pub(super) use place::{Place, open};
pub(super) use units::size;

use clap::Subcommand;
use megaburn_models::ModelError;
use megaburn_train::{Exit, TrainError};

use super::fail;

#[derive(Subcommand)]
pub(super) enum CheckpointCommand {
    /// List the checkpoints of runs: step, age, size, layout, state, and which one a resume takes.
    Ls(ls::LsArgs),
    /// Show what a checkpoint holds: model, tensors, files and the trainer's state.
    Show(show::ShowArgs),
    /// Compute the mean, deviation, range and norm of a checkpoint's tensors, and count zeros, NaNs
    /// and infinities.
    Stats(stats::StatsArgs),
    /// Compare every byte of checkpoints with the hashes that were written, and name all damage.
    Verify(verify::VerifyArgs),
    /// Compare two checkpoints: configuration, trainer's state and tensors.
    Diff(diff::DiffArgs),
    /// Delete old checkpoints of a run that is not in progress.
    Prune(prune::PruneArgs),
    /// Write a checkpoint that holds only the weights of another.
    Weights(weights::WeightsArgs),
    /// Write the weighted mean of the weights of several checkpoints.
    Average(average::AverageArgs),
    /// Copy a checkpoint from an object store to this host, and verify it.
    Fetch(fetch::FetchArgs),
    /// Rewrite a checkpoint as the ranks of another layout would have written it.
    Reshard(reshard::ReshardArgs),
    /// Make a run that continues a checkpoint of Megatron-LM.
    FromMegatron(from_megatron::FromMegatronArgs),
    /// Write a checkpoint of a run as one that Megatron-LM continues.
    ToMegatron(to_megatron::ToMegatronArgs),
}

impl CheckpointCommand {
    /// Exits with 0 if all is whole and equal, with 1 after damage or a difference, and with 2 for
    /// bad input.
    pub(super) fn run(self) -> ExitCode {
        let is_fine = match self {
            Self::Ls(args) => args.run(),
            Self::Show(args) => args.run().map(|()| true),
            Self::Stats(args) => args.run().map(|()| true),
            Self::Verify(args) => args.run(),
            Self::Diff(args) => args.run(),
            Self::Prune(args) => args.run(),
            Self::Weights(args) => args.run().map(|()| true),
            Self::Average(args) => args.run().map(|()| true),
            Self::Reshard(args) => args.run().map(|()| true),
            Self::FromMegatron(args) => args.run().map(|()| true),
            Self::ToMegatron(args) => args.run().map(|()| true),
            Self::Fetch(args) => args.run().map(|()| true),
        };
        match is_fine {
            Ok(true) => Exit::Done.into(),
            Ok(false) => Exit::Failed.into(),
            Err(error) => fail(&error.to_string(), exit(&error)),
        }
    }
}

/// Damage is not bad input: the path was right.
fn exit(error: &TrainError) -> Exit {
    match error {
        TrainError::Checkpoint(error) | TrainError::Model(ModelError::Checkpoint(error))
            if error.is_damage() =>
        {
            Exit::Failed
        }
        error => error.exit(),
    }
}
