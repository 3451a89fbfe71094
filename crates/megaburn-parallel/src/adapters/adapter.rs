use burn::{
    module::{Module, Param, Reparameterization},
    tensor::Tensor,
};
use megaburn_collective::{Group, region::copy_to};
use megaburn_mesh::ShardSpec;

/// The factors of a weight, which `Param::val` adds to it. [`ShardedLora`](crate::ShardedLora)
/// attaches them.
#[derive(Module, Debug)]
pub struct ShardedAdapter {
    /// The factor `[d_input, rank]`, or this rank's rows of it.
    pub a: Param<Tensor<2>>,
    /// The factor `[rank, d_output]`, or this rank's columns of it.
    pub b: Param<Tensor<2>>,
    /// The factor of the product.
    pub scale: f64,
    #[module(skip)]
    pub(super) parts: LoraParts,
}

#[derive(Clone, Debug)]
pub(super) struct LoraParts {
    pub(super) split: LoraSplit,
    /// The parts of A and B that this rank holds.
    pub(super) specs: [ShardSpec; 2],
    pub(super) group: Group,
}

/// How a weight and its factors are split.
#[derive(Clone, Copy, Debug)]
pub(super) enum LoraSplit {
    Whole,
    Columns,
    Rows,
}

impl ShardedAdapter {
    /// The parts of the factors that this rank holds, by their paths below the weight.
    pub(crate) fn specs(&self) -> [(&'static str, &ShardSpec); 2] {
        let [a, b] = &self.parts.specs;
        [("lora.a", a), ("lora.b", b)]
    }

    /// `scale A B`. Each rank multiplies the factor that all share with its own part of the other, so
    /// backward sums the gradient of the shared one.
    fn delta(&self) -> Tensor<2> {
        let LoraParts { split, group, .. } = &self.parts;
        let (a, b) = (self.a.val(), self.b.val());
        let product = match split {
            LoraSplit::Whole => a.matmul(b),
            LoraSplit::Columns => copy_to(a, group).matmul(b),
            LoraSplit::Rows => a.matmul(copy_to(b, group)),
        };
        product.mul_scalar(self.scale)
    }
}

impl Reparameterization for ShardedAdapter {
    const NAME: &'static str = "lora";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let delta = self.delta().reshape(base.shape());
        base + delta
    }
}
