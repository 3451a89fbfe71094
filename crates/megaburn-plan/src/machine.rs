//! How long a GPU takes for products, attention and other kernels, and for sending bytes.

use megaburn_mesh::{Axis, Layout};
use megaburn_train::{
    TrainConfig,
    config::{Dtype, PrecisionRecipe},
};

use crate::{
    calibration as rates,
    error::PlanError,
    gpu::Gpu,
    links::{Links, ranks_of_first_node},
};

/// A GPU that computes in the types of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    pub(crate) gpu: Gpu,
    /// FLOP/s of large products in the type of the run.
    products: f64,
    /// FLOP/s of large products of quantised layers; as `products` without a recipe.
    quantized: f64,
    /// FLOP/s of attention over long sequences.
    attention: f64,
}

/// The kind of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProductKind {
    /// In the type of the run.
    Plain,
    /// In the precision of `precision.recipe`.
    Quantized,
    /// Of experts, in the type of the run.
    Grouped,
    /// Of experts, in the precision of `precision.recipe`.
    QuantizedGrouped,
}

impl Machine {
    /// `gpu` with the types of `config`.
    ///
    /// # Errors
    /// The recipe needs units that the GPU does not have.
    pub(crate) fn new(gpu: Gpu, config: &TrainConfig) -> Result<Self, PlanError> {
        let (products, attention) = match (config.train.dtype, config.train.tf32) {
            (Dtype::F32, true) => (rates::F32_PRODUCTS * gpu.tf32, gpu.tf32),
            (Dtype::F32, false) => (rates::F32_PRODUCTS * gpu.f32, gpu.f32),
            (Dtype::Bf16 | Dtype::F16, _) => (rates::PRODUCTS * gpu.bf16, gpu.bf16),
        };
        let recipe = config.precision.recipe;
        let quantized = match (recipe, gpu.fp8) {
            (PrecisionRecipe::Bf16, _) => products,
            (PrecisionRecipe::Tensorwise | PrecisionRecipe::Delayed, Some(peak)) => {
                rates::FP8_PRODUCTS * peak
            }
            (PrecisionRecipe::Blockwise, Some(peak)) if gpu.is_hopper() => {
                rates::BLOCK_PRODUCTS * peak
            }
            // Emulated: products of f32 matrices.
            (_, Some(_)) if config.train.tf32 => rates::F32_PRODUCTS * gpu.tf32,
            (_, Some(_)) => rates::F32_PRODUCTS * gpu.f32,
            (_, None) => {
                return Err(PlanError::NoFp8 {
                    recipe: recipe.to_string(),
                    gpu: gpu.title,
                });
            }
        };
        Ok(Self {
            gpu,
            products,
            quantized,
            attention: rates::ATTENTION * attention,
        })
    }

    /// Seconds of a product of `[rows, inner]` with `[inner, columns]`, or of its gradients.
    pub(crate) fn product(
        &self,
        [rows, inner, columns]: [f64; 3],
        smallest: f64,
        kind: ProductKind,
    ) -> f64 {
        let flops = 2.0 * rows * inner * columns;
        if flops == 0.0 {
            return 0.0;
        }
        let small = |half: f64| smallest / (smallest + half);
        let rate = match kind {
            ProductKind::Plain => self.products * small(rates::PRODUCTS_HALF),
            ProductKind::Quantized => self.quantized * small(rates::PRODUCTS_HALF),
            ProductKind::Grouped => self.products * rates::GROUPED * small(rates::GROUPED_HALF),
            ProductKind::QuantizedGrouped => {
                self.quantized * rates::GROUPED * small(rates::GROUPED_HALF)
            }
        };
        flops / rate
    }

    /// Seconds of attention with this number of FLOPs, whose queries see at most `keys` keys.
    pub(crate) fn attention(&self, flops: f64, keys: f64, is_context_parallel: bool) -> f64 {
        let parts = match is_context_parallel {
            true => rates::CONTEXT_ATTENTION,
            false => 1.0,
        };
        flops * (keys + rates::ATTENTION_HALF) / (self.attention * parts * keys.max(1.0))
    }

    /// Seconds in which kernels read and write this number of bytes.
    pub(crate) fn memory(&self, bytes: f64) -> f64 {
        bytes / (rates::MEMORY * self.gpu.memory_bandwidth)
    }

    /// The connections between the ranks of a group over `axes`. Ranks fill one server after the
    /// other.
    pub(crate) fn links(&self, layout: &Layout, axes: &[Axis]) -> Links {
        let ranks = axes.iter().map(|axis| layout.degree(*axis)).product();
        Links {
            ranks,
            inside: ranks_of_first_node(layout, axes, self.gpu.gpus_per_node),
            nvlink: rates::NVLINK * self.gpu.nvlink,
            network: rates::NETWORK * self.gpu.network,
        }
    }
}
