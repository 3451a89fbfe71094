//! The operations of a transformer, each with a plain-tensor reference and (from CUDA on) a fused CubeCL kernel.
