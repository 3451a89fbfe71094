//! Tests that span crates, in one binary.

mod bad_input;
mod bf16;
mod bf16_models;
mod bf16_state;
mod child;
mod docs;
mod f16;
mod fixtures;
mod gather;
mod generate;
mod house;
mod layouts;
mod matrix;
mod model_errors;
mod models;
mod optimizers;
mod outside;
mod processes;
mod published;
mod recipes;
mod resume;
mod run;
mod schedules;
mod text;
mod tokenizers;
mod zero;
