//! Measurements; see the files beside this one.
