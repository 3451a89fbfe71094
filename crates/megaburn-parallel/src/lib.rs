//! Tensor- and sequence-parallel layers as ordinary Burn modules.
