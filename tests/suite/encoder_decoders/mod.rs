//! Encoder-decoder models: T5 on sentences with masked spans.

mod documented;
mod layouts;
mod refused;
mod runs;
mod tokens;
