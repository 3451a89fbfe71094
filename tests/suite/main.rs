//! Tests that span crates, in one binary.

mod bad_input;
mod child;
mod fixtures;
mod gather;
mod house;
mod layouts;
mod outside;
mod processes;
mod resume;
mod run;
mod text;
