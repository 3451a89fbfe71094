//! Tests that span crates, in one binary.

mod checkpoint_cli;
mod config;
mod context;
mod data;
mod doctor;
mod encoder_decoders;
mod encoders;
mod experts;
mod fp8;
mod house;
mod layouts;
mod models;
mod mtp;
mod optim;
mod own_models;
mod plan;
mod precision;
mod recipes;
mod runs;
