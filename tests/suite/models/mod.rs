//! Models of Hugging Face, PyTorch and torchtitan: conversion, verification, generation.

mod activations;
mod foreign;
mod fp8;
pub(crate) mod generate;
pub(crate) mod interrupted;
mod own_family;
mod parts;
pub(crate) mod published;
pub(crate) mod refused;
pub(crate) mod round_trip;
pub(crate) mod tokenizers;
pub(crate) mod transformers;
