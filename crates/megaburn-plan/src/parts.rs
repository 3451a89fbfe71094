//! Seconds of a pass, by what takes them.

use std::ops::{Add, AddAssign, Mul};

/// Seconds of a pass, by what takes them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Parts {
    /// Products of matrices.
    pub(crate) products: f64,
    /// Core attention.
    pub(crate) attention: f64,
    /// Kernels that wait for memory.
    pub(crate) memory: f64,
    /// Communication that nothing hides.
    pub(crate) communication: f64,
    /// Waiting for the host, which enqueues more slowly than the GPU computes.
    pub(crate) host: f64,
}

impl Parts {
    /// The sum of all parts.
    pub(crate) fn total(self) -> f64 {
        self.products + self.attention + self.memory + self.communication + self.host
    }

    /// Adds the wait for a host that needs this number of seconds to enqueue the pass.
    pub(crate) fn enqueued_in(mut self, seconds: f64) -> Self {
        self.host += (seconds - self.total()).max(0.0);
        self
    }
}

impl Add for Parts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            products: self.products + other.products,
            attention: self.attention + other.attention,
            memory: self.memory + other.memory,
            communication: self.communication + other.communication,
            host: self.host + other.host,
        }
    }
}

impl AddAssign for Parts {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Mul<f64> for Parts {
    type Output = Self;

    fn mul(self, times: f64) -> Self {
        Self {
            products: self.products * times,
            attention: self.attention * times,
            memory: self.memory * times,
            communication: self.communication * times,
            host: self.host * times,
        }
    }
}

/// The passes of one micro-batch through a part of a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Passes {
    /// Forward.
    pub(crate) forward: Parts,
    /// The gradient of the input, including what is recomputed before it.
    pub(crate) input: Parts,
    /// The gradients of the weights.
    pub(crate) weight: Parts,
}

impl Passes {
    /// The sum of all passes.
    pub(crate) fn total(self) -> Parts {
        self.forward + self.input + self.weight
    }
}

impl AddAssign for Passes {
    fn add_assign(&mut self, other: Self) {
        self.forward += other.forward;
        self.input += other.input;
        self.weight += other.weight;
    }
}
