//! Groups of ranks, their collectives over threads and TCP, and differentiable regions on tensors.
