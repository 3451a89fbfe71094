//! Trainings on several layouts against a plain loop on one rank.

mod checkpoints;
mod layouts;
mod program;
mod refusals;
mod stops;
