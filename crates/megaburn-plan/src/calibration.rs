//! How much of its peaks a GPU reaches in training steps. Each number names the file of
//! `benches/results` from which it was derived, or says that it is an assumption.
//!
//! The numbers were fitted to whole steps, in which GPUs run slower than in short measurements of
//! one operation because their clock drops under load.

/// Share of the peak that large products in bf16 reach: 0.695 with 4096 features. `train_step.md`
/// (4096 and 8192 tokens) and `data_parallel.md` (12 layers, "alone").
pub(crate) const PRODUCTS: f64 = 0.711;
/// A product whose smallest dimension is this reaches half of that. `models.md` (hidden 768 to
/// 1024).
pub(crate) const PRODUCTS_HALF: f64 = 96.0;
/// As [`PRODUCTS`], of the peak in FP8. `fp8.md` (1,251 TFLOP/s in the step of 12 layers).
pub(crate) const FP8_PRODUCTS: f64 = 0.647;
/// As [`FP8_PRODUCTS`], with scales of blocks. `fp8.md` (12 layers on two H200: 278.9 ms, and 254.0
/// with one scale per matrix).
pub(crate) const BLOCK_PRODUCTS: f64 = 0.52;
/// As [`PRODUCTS`], of the peak in f32 and tf32. An assumption.
pub(crate) const F32_PRODUCTS: f64 = 0.72;
/// Share of the rate of [`PRODUCTS`] that products of experts reach. `moe.md` (steps of Mixtral).
pub(crate) const GROUPED: f64 = 0.86;
/// As [`PRODUCTS_HALF`], for products of experts. `moe.md` (steps of Qwen3-30B-A3B).
pub(crate) const GROUPED_HALF: f64 = 256.0;

/// Share of the peak in bf16 that attention reaches with long sequences. `train_step.md` (32768
/// tokens).
pub(crate) const ATTENTION: f64 = 0.587;
/// Attention over this number of keys reaches half of that. `train_step.md` (4096 tokens: 4.1 ms of
/// attention) and `models.md` (bert-large with 512 tokens: 14 ms).
pub(crate) const ATTENTION_HALF: f64 = 900.0;
/// Share of that rate with context parallelism, whose parts are smaller. `context.md` (cp4).
pub(crate) const CONTEXT_ATTENTION: f64 = 0.8;

/// Share of the memory's bandwidth that the other kernels reach. `fp8.md` (norms, SwiGLU, rotation
/// and casts of the step of 12 layers) and `data_parallel.md` (AdamW: 124 million updates a
/// millisecond).
pub(crate) const MEMORY: f64 = 0.78;

/// Share of NVLink's bandwidth that collectives reach. `nccl.md` (1 GiB over four GPUs).
pub(crate) const NVLINK: f64 = 0.72;
/// Seconds that a collective takes in addition to its bytes. `nccl.md` (16 and 64 MiB over four
/// GPUs).
pub(crate) const COLLECTIVE: f64 = 25e-6;
/// Share of the network's bandwidth that collectives reach. An assumption: no run over a real
/// network was measured.
pub(crate) const NETWORK: f64 = 0.8;
/// What communication that runs while kernels compute costs them, as a share of its own time.
/// `data_parallel.md` (hiding 35 and 48 ms costs 20 to 24 ms of computing).
pub(crate) const INTERFERENCE: f64 = 0.5;
/// Bytes per second, each way at once, between a GPU and host memory. `data_parallel.md` (state in
/// host memory).
pub(crate) const HOST_LINK: f64 = 33e9;

/// Seconds in which the host enqueues a block's forward, input gradient and weight gradient.
/// `models.md` (gpt2 and llama with micro-batches of one sample).
pub(crate) const ENQUEUE: [f64; 3] = [0.2e-3, 0.25e-3, 0.15e-3];
/// Seconds in which nothing runs between the end of a step and the next one. `data_parallel.md`
/// (idle times of the timeline of 12 layers).
pub(crate) const BETWEEN_STEPS: f64 = 2e-3;
/// Seconds that a block of experts waits in a pass for the number of rows. `moe.md` (20.2 ms idle
/// in 24 forward passes).
pub(crate) const ROW_COUNTS: f64 = 0.85e-3;

/// The gradients of activations that backward of a block holds at once, as a share of the
/// activations that the block keeps. `layouts.md` (32768 tokens without logits, recomputed blocks).
pub(crate) const BLOCK_GRADIENTS: f64 = 0.6;
/// Share of the bytes of tensors that the pools of the allocator reserve in addition, next to a page.
/// `layouts.md` and `data_parallel.md` ("GiB" next to "of tensors").
pub(crate) const ALLOCATOR: f64 = 0.03;
/// Bytes that the CUDA context, cuBLASLt and cuDNN take, outside of the pools. An assumption.
pub(crate) const CUDA_CONTEXT: u64 = 1 << 30;
/// Bytes of NCCL's buffers for each group of ranks that communicates. An assumption.
pub(crate) const COMMUNICATOR: u64 = 384 << 20;
