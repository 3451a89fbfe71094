//! What a backend has to provide for quantised products.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, FloatDType, Tensor};
use megaburn_autograd::IntoPrimitive;
use megaburn_autograd::backend_ops::slice_rows;

use super::hadamard::hadamard;
use super::random_numbers::{Drawn, RandomNumbers};
use super::recipe::{MatrixRole, QuantizationRecipe, SummedDim};
use super::sequence_shards::ShardCollectives;
use crate::gemm_ops::GemmAlgorithm;
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

/// The algorithm of products of ranges of rows: their numbers of rows change with every call, so
/// they are not tuned.
pub(super) const RANGE_ALGORITHM: GemmAlgorithm = GemmAlgorithm::Deterministic;

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

    /// The operand of a matrix, for products that sum over the columns, of which each rank has the
    /// operand of some rows. All have the same scale.
    ///
    /// # Shapes
    /// `own: [r, c]`, the same on every rank; result: `[ranks * r, c]`
    fn gathered(own: Self::Operand, over: &dyn ShardCollectives) -> Self::Operand;

    /// The operand for products that sum over the rows, made of that for products that sum over the
    /// columns. The matrix has one scale.
    ///
    /// # Shapes
    /// `[r, c]` to `[c, r]`, or more columns if the matrix is padded
    fn transposed(operand: Self::Operand) -> Self::Operand;

    /// The largest magnitude of each range of rows, `[ranges]` in f32; 0 without rows.
    fn largest_magnitudes(x: FloatTensor<Self>, rows: &[Range<usize>]) -> FloatTensor<Self> {
        let device = Self::wrap::<2>(x.clone()).device();
        let of = |rows: &Range<usize>| match rows.is_empty() {
            true => Tensor::zeros([1], (&device, DType::F32)),
            false => {
                let x = slice_rows::<Self>(x.clone(), 0, rows.clone());
                Self::wrap::<1>(Self::largest_magnitude(x))
            }
        };
        Self::unwrap(Tensor::cat(rows.iter().map(of).collect(), 0))
    }

    /// Quantises each range of rows as a matrix of its own; `None` for those without rows.
    ///
    /// # Shapes
    /// `x: [r, c]`; `amaxes: [ranges]`, as in [`quantize_matrix`](Self::quantize_matrix)
    fn quantize_ranges(
        x: FloatTensor<Self>,
        rows: &[Range<usize>],
        amaxes: Option<FloatTensor<Self>>,
        how: Quantization,
    ) -> Vec<Option<Quantized<Self::Operand>>> {
        quantize_each::<Self>(x, rows, amaxes, how)
    }

    /// `a bᵀ` of each range of rows, one below the other; `a` is `None` without rows, where `b` is
    /// not used.
    ///
    /// # Shapes
    /// `a: [rows, k]`, `b: [columns, k]`, result: `[all rows, columns]` on the device of `like`
    fn products_of_ranges(
        like: &FloatTensor<Self>,
        (rows, columns): (&[Range<usize>], usize),
        operands: impl Iterator<Item = (Option<Self::Operand>, Self::Operand)>,
        dtype: FloatDType,
        of: ProductOf,
    ) -> FloatTensor<Self> {
        let products = operands.filter_map(|(a, b)| {
            let product = Self::quantized_product(a?, b, dtype, of, RANGE_ALGORITHM);
            Some(Self::wrap::<2>(product))
        });
        let products: Vec<Tensor<2>> = products.collect();
        let num_rows = rows.iter().map(Range::len).sum::<usize>();
        Self::unwrap(if products.is_empty() {
            let device = Self::wrap::<2>(like.clone()).device();
            Tensor::empty([num_rows, columns], (&device, DType::from(dtype)))
        } else {
            Tensor::cat(products, 0)
        })
    }

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
        algorithm: GemmAlgorithm,
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
        algorithm: GemmAlgorithm,
    ) -> Tensor<2>;
}

/// [`QuantizedOps::quantize_ranges`] one by one.
pub(super) fn quantize_each<B: QuantizedOps>(
    x: FloatTensor<B>,
    rows: &[Range<usize>],
    amaxes: Option<FloatTensor<B>>,
    how: Quantization,
) -> Vec<Option<Quantized<B::Operand>>> {
    let of = |(index, rows): (usize, &Range<usize>)| {
        let amaxes = amaxes.clone();
        let amax = amaxes.map(|amaxes| slice_rows::<B>(amaxes, 0, index..index + 1));
        let x = || slice_rows::<B>(x.clone(), 0, rows.clone());
        (!rows.is_empty()).then(|| B::quantize_matrix(x(), amax, how.clone()))
    };
    rows.iter().enumerate().map(of).collect()
}
