//! Configuration: errors, warnings, recipes, estimates.

pub(crate) mod estimates;
pub(crate) mod recipes;
pub(crate) mod refused;
pub(crate) mod removed_keys;
pub(crate) mod schema;
pub(crate) mod warnings;
