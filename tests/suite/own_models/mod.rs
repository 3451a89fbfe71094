//! Runs whose model is not a decoder.

mod configs;
mod faults;
mod hangs;
mod layouts;
mod model;
mod profile;
mod resume;
mod stragglers;
