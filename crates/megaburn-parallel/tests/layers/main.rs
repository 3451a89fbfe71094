//! Compares every layer with plain Burn modules in a group of one, and with itself under every
//! layout: initial weights, outputs, and gradients of the input and of each parameter.

mod alibi;
mod blocks;
mod burn_user;
mod cached;
mod context;
mod cross_attention;
mod cross_entropy;
mod degree_one;
mod dropout;
mod embedding;
mod errors;
mod found_amaxes;
mod latent;
mod linear;
mod moe;
mod params;
mod plan;
mod precision;
mod recompute;
mod relative_bias;
mod sequence_gather;
mod sequences;
mod support;
mod trial;
