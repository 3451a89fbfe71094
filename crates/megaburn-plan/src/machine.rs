//! How long a GPU takes for products, attention and other kernels, and for sending bytes.

use megaburn_mesh::{Axis, Layout};
use megaburn_train::{
    TrainConfig,
    config::{Dtype, PrecisionRecipe},
};

use crate::{calibration as rates, error::PlanError, gpu::Gpu};

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

    /// The bandwidth in bytes per second at which a rank sends to the other ranks of a group over
    /// `axes`. Ranks fill one server after the other. In a group over several servers, as many
    /// network adapters send as the group has ranks in a server.
    pub(crate) fn bandwidth(&self, layout: &Layout, axes: &[Axis]) -> f64 {
        let node = self.gpu.gpus_per_node;
        let nvlink = rates::NVLINK * self.gpu.nvlink;
        let members: usize = axes.iter().map(|axis| layout.degree(*axis)).product();
        let inside = ranks_of_first_node(layout, axes, node);
        if inside == members {
            return nvlink;
        }
        (inside as f64 * rates::NETWORK * self.gpu.network).min(nvlink)
    }
}

/// How many of the first `node` ranks are in the group of rank 0 over `axes`.
fn ranks_of_first_node(layout: &Layout, axes: &[Axis], node: usize) -> usize {
    let is_expert = axes.iter().any(|axis| !Axis::DENSE.contains(axis));
    let grid = if is_expert { Axis::EXPERT } else { Axis::DENSE };
    let is_member = |rank: &usize| {
        let mut left = *rank;
        grid.into_iter().all(|axis| {
            let degree = layout.degree(axis);
            let coordinate = left % degree;
            left /= degree;
            coordinate == 0 || axes.contains(&axis)
        })
    };
    (0..node.min(layout.world_size())).filter(is_member).count()
}

#[cfg(test)]
mod tests {
    use megaburn_mesh::Mesh;

    use super::*;

    #[test]
    fn a_group_over_servers_sends_through_as_many_adapters_as_it_has_ranks_in_a_server() {
        let machine = Machine::new(Gpu::H100, &TrainConfig::default()).unwrap();
        let layout: Layout = "tp8-dp4-sp".parse().unwrap();
        assert_eq!(machine.bandwidth(&layout, &[Axis::Tp]), 0.72 * 450e9);
        assert_eq!(machine.bandwidth(&layout, &[Axis::Dp]), 0.8 * 50e9);
        let layout: Layout = "dp16".parse().unwrap();
        assert_eq!(machine.bandwidth(&layout, &[Axis::Dp]), 8.0 * 0.8 * 50e9);
    }

    #[test]
    fn ranks_of_a_server_are_counted_as_the_mesh_numbers_them() {
        for text in ["tp2-cp2-dp4-sp", "tp2-dp8-ep4-etp2-sp", "cp2-pp2-dp4-ep4"] {
            let layout: Layout = text.parse().unwrap();
            let mesh = Mesh::new(layout);
            for axes in [
                &[Axis::Tp][..],
                &[Axis::Dp, Axis::Cp],
                &[Axis::Ep],
                &[Axis::Edp],
            ] {
                let members = mesh.group_of(axes, 0);
                let expected = members.iter().filter(|rank| **rank < 8).count();
                assert_eq!(
                    ranks_of_first_node(&layout, axes, 8),
                    expected,
                    "{text} {axes:?}"
                );
            }
        }
    }
}
