//! Trains a `Learner` program of `burn-train` in tensor and data parallelism.
//!
//! Every rank runs the same program, as with PyTorch's DDP. Three things change: the model has
//! parallel layers, [`ParallelTraining::launch`] takes what `SupervisedTraining::launch` took, and
//! [`run_ranks`] runs the program on all ranks:
//!
//! ```text
//! let training = SupervisedTraining::new(dir, train, valid).metrics((LossMetric::new(),)).num_epochs(3);
//! // Was: training.launch(Learner::new(model, optimizer, scheduler));
//! let result = ParallelTraining::new(&groups).launch(training, model, optimizer, scheduler)?;
//! ```
//!
//! | of `burn-train` | with `ParallelTraining` |
//! |---|---|
//! | data loaders | each data-parallel rank reads its share of the items, as with Burn's own DDP |
//! | losses that are means over a batch | gradients are weighted by the ranks' numbers of items, so the last batch may be smaller on some ranks |
//! | `grads_accumulation` | as on one device |
//! | metrics, dashboard, logs, summary | on rank 0, over the outputs of all ranks ([`RankOutput`]) |
//! | validation | split over data-parallel ranks, too |
//! | early stopping, `Interrupter` | all ranks stop after the same step |
//! | learning-rate schedulers, `checkpoint(epoch)` | unchanged |
//! | `with_default_checkpointers` | refused, because each rank would save its own shards as if they were the model; see [`ParallelTraining::with_checkpoints`] |
//! | LAMB, Muon, Adafactor, an optimizer's clipping | with tp refused, because they would see one rank's shards, except in a [`ShardedOptimizer`](megaburn_optim::ShardedOptimizer) |
//! | data loaders with several workers, or shared by rank threads | not with tp, whose ranks must read the same batches; different losses are an error |
//! | `with_training_strategy`, `gradient_checkpointing` | replaced by this crate's strategy; the model's device decides on checkpointing |

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]

mod checkpoint;
mod error;
mod events;
mod gradients;
mod optimizer;
mod output;
mod parts;
mod ranks;
mod run;
mod shares;
mod silent;
mod start;
mod steps;
mod strategy;
#[cfg(test)]
mod tests;
mod training;
mod values;

pub use error::LearnerError;
pub use optimizer::TrainingOptimizer;
pub use output::RankOutput;
pub use ranks::run_ranks;
pub use training::ParallelTraining;
