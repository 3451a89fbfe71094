//! What a backend has to provide for quantised products.

use burn::backend::tensor::FloatTensor;
use burn::tensor::{FloatDType, Tensor};
use megaburn_autograd::IntoPrimitive;

use super::hadamard::hadamard;
use super::random_numbers::{Drawn, RandomNumbers};
use super::recipe::{MatrixRole, QuantizationRecipe, SummedDim};
use crate::gradient_accumulation_fusion::GradAccumFusion;

/// How a matrix is quantised, and for which products.
#[derive(Clone, Debug)]
pub(crate) struct Quantization {
    pub(crate) recipe: QuantizationRecipe,
    pub(crate) role: MatrixRole,
    /// Whether a product will sum over the rows.
    pub(crate) rows: bool,
    /// Whether a product will sum over the columns.
    pub(crate) cols: bool,
    /// What the recipe draws at random.
    pub(crate) random: RandomNumbers,
}

impl Quantization {
    /// The matrix as it is quantised for a product that sums over a dimension: it may be transformed.
    pub(super) fn source<B: IntoPrimitive>(
        &self,
        x: FloatTensor<B>,
        summed: SummedDim,
    ) -> FloatTensor<B> {
        match self.recipe.transforms(self.role, summed) {
            true => hadamard::<B>(x, self.random.signs()),
            false => x,
        }
    }

    /// The place of that matrix's largest magnitude among those of the matrix.
    pub(super) fn amax_index(&self, summed: SummedDim) -> usize {
        self.recipe.transforms(self.role, summed).into()
    }

    /// The random numbers that the elements are rounded with, if they are.
    pub(super) fn drawn(&self, shape: [usize; 2], summed: SummedDim) -> Option<Drawn> {
        let draws = self.recipe.rounds_stochastically(self.role);
        draws.then(|| self.random.drawn(shape, summed))
    }
}

/// A quantised matrix `[r, c]` as an operand of products.
#[derive(Clone, Debug)]
pub(crate) struct Quantized<T> {
    /// For products that sum over the rows: `[c, r]`, or more columns if the matrix was padded.
    pub(crate) rows: Option<T>,
    /// For products that sum over the columns: `[r, c]`.
    pub(crate) cols: Option<T>,
}

/// Which of a linear layer's three products is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProductOf {
    /// The result. Tensor cores may sum with fewer bits than f32, as in PyTorch and Transformer
    /// Engine.
    Result,
    /// The gradient of the input.
    InputGradient,
    /// The gradient of the weight, which sums over tokens.
    WeightGradient,
}

/// Quantisation and products of a backend.
pub(crate) trait QuantizedOps: GradAccumFusion + IntoPrimitive {
    /// A quantised matrix with the dimension that a product sums over last.
    type Operand: Clone + std::fmt::Debug + Send + Sync + 'static;

    /// The largest magnitude of `x`, `[1]` in f32; NaN if an element is NaN.
    fn largest_magnitude(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Quantises a matrix.
    ///
    /// # Shapes
    /// `x: [r, c]`; `amax: [1]` in f32, given if the recipe
    /// [needs it](QuantizationRecipe::needs_amax). A recipe that
    /// [transforms](QuantizationRecipe::transforms) the matrix needs `[2]`: the second is that of the
    /// transformed matrix.
    fn quantize_matrix(
        x: FloatTensor<Self>,
        amax: Option<FloatTensor<Self>>,
        how: Quantization,
    ) -> Quantized<Self::Operand>;

    /// The numbers that the elements of an operand stand for, in f32.
    fn numbers_of(operand: Self::Operand) -> FloatTensor<Self>;

    /// `a bᵀ`, summed in f32.
    ///
    /// # Shapes
    /// `a: [m, k]`, `b: [n, k]`, result: `[m, n]`
    fn quantized_product(
        a: Self::Operand,
        b: Self::Operand,
        dtype: FloatDType,
        of: ProductOf,
    ) -> FloatTensor<Self>;

    /// `sum + a bᵀ` in f32; without `sum` it is `a bᵀ`, which may then be written to `room`. `sum`
    /// and `room` may be written in place.
    ///
    /// # Shapes
    /// `a: [m, k]`, `b: [n, k]`; `sum`, `room` and the result are `[m, n]`
    fn add_quantized_product(
        a: Self::Operand,
        b: Self::Operand,
        sum: Option<Tensor<2>>,
        room: Option<Tensor<2>>,
    ) -> Tensor<2>;
}
