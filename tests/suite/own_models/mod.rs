//! Runs whose model is not a decoder.

mod configs;
mod layouts;
mod model;
mod profile;
mod resume;
