//! Only tests live here: see `main.rs`.
