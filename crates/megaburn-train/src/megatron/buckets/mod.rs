//! Finds parameters in the buckets of Megatron-Core's distributed optimizer (`dp_reshardable`).
//!
//! A bucket is flat: which elements are of which parameter follows from the order of parameters in
//! the model of a rank, and from nothing in the checkpoint. So the places that the definitions give
//! are proved: the f32 weights at the place of each parameter, rounded to the type of the model's
//! weights, must be the weights of the model to the bit.

mod find;
mod order;
mod places;
mod proof;
mod ranks;
mod refused;
mod split;
mod values;

pub(super) use find::find;
pub(super) use values::Buckets;
