//! The linear map whose three products multiply quantised matrices.
//!
//! `y = q(x) q(w)`, `dx = q(dy) q(w)ᵀ` and `dw = q(x)ᵀ q(dy)`, where q quantises along the
//! dimension that the product sums over. The rounding itself has the gradient 1.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Shape, Tensor};
use megaburn_autograd::backend_ops::{cast, row, rows};
use megaburn_autograd::{
    FusedOp, InputGrads, LinearPass, MainGrad, RecomputeFn, SavedInput, optional, read_weight,
    run_or_defer,
};

use super::amax::AmaxSource;
use super::found::FoundAmax;
use super::operands::{ProductOf, Quantization, Quantized, QuantizedOps};
use super::options::LinearQuantization;
use super::recipe::{MatrixRole, SummedDim};
use crate::bias::{ColumnSum, bias_gradient};
use crate::gemm_ops::swapped;
use crate::linear::LinearOptions;

/// The inputs are those of [`linear`](crate::linear).
#[derive(Debug)]
pub(super) struct QuantizedLinear {
    pub(super) options: LinearOptions,
    pub(super) quantization: LinearQuantization,
}

#[derive(Clone, Debug)]
pub(super) struct Saved<T, Q> {
    shape: Shape,
    x: SavedOperand<T, Q>,
    w: T,
    options: LinearOptions,
    quantization: LinearQuantization,
}

/// The input as an operand of the weight's gradient.
#[derive(Clone, Debug)]
enum SavedOperand<T, Q> {
    Quantized(Q),
    /// This rank's shard of the tokens, for products that sum over the columns.
    Shard(Q),
    /// The input is recomputed, and quantised from the largest magnitude that it had.
    Again {
        x: SavedInput<T>,
        amax: Option<T>,
    },
}

impl<B: QuantizedOps + ColumnSum, const N: usize> FusedOp<B, N> for QuantizedLinear {
    type Saved = Saved<FloatTensor<B>, B::Operand>;

    fn forward(self, inputs: [FloatTensor<B>; N]) -> (FloatTensor<B>, Self::Saved) {
        let Self {
            mut options,
            quantization,
        } = self;
        let ([x, w], [bias]) = optional(inputs);
        let shape = x.shape();
        let dtype = x.dtype();
        let amax = quantization.amax::<B>(
            MatrixRole::Input,
            rows::<B>(x.clone()),
            options.found.input.as_ref(),
        );
        quantization.count::<B>(MatrixRole::Input, &rows::<B>(x.clone()), amax.as_ref());
        let again: Option<RecomputeFn> = options.again.take();
        let shards = quantization.shards_of(MatrixRole::Input).cloned();
        let how = Quantization {
            rows: again.is_none() && shards.is_none(),
            ..quantization.of(MatrixRole::Input, SummedDim::Cols)
        };
        let found = B::quantize_matrix(rows::<B>(x.clone()), amax.clone(), how);
        let own = operand(found.cols);
        let (all, saved) = match &shards {
            Some(shards) => (
                B::gathered(own.clone(), &*shards.over),
                again.is_none().then_some(SavedOperand::Shard(own)),
            ),
            None => (own, found.rows.map(SavedOperand::Quantized)),
        };
        let weight =
            quantization.weight::<B>(w.clone(), &options, LinearPass::Forward, SummedDim::Rows);
        let y = B::quantized_product(
            all,
            weight,
            dtype.into(),
            ProductOf::Result,
            options.algorithm,
        );
        let mut of_y = shape.clone();
        of_y[shape.num_dims() - 1] = y.shape()[1];
        if let Some(shards) = shards {
            of_y[0] *= shards.over.num_ranks();
        }
        let y = match quantization.shards_of(MatrixRole::Gradient) {
            Some(shards) => {
                let y = shards.reduce_scattered::<B>(B::float_reshape(y, of_y));
                of_y = y.shape();
                rows::<B>(y)
            }
            None => y,
        };
        let y = match bias {
            Some(bias) => B::float_add(y, row::<B>(bias, dtype.into())),
            None => y,
        };
        let x = saved.unwrap_or_else(|| SavedOperand::Again {
            x: SavedInput::new(x, again),
            amax,
        });
        let saved = Saved {
            shape,
            x,
            w,
            options,
            quantization,
        };
        (B::float_reshape(y, of_y), saved)
    }

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, mut grads: InputGrads<'_, B>) {
        let Saved {
            shape,
            x,
            w,
            options,
            quantization,
        } = saved;
        let dtype = w.dtype();
        // A magnitude that was found in another type may be another one.
        let found = options.found.gradient.as_ref();
        let found = found.filter(|_| dy.dtype() == dtype);
        let dy = cast::<B>(rows::<B>(dy), dtype.into());
        let amax = quantization.amax::<B>(MatrixRole::Gradient, dy.clone(), found);
        quantization.count::<B>(MatrixRole::Gradient, &dy, amax.as_ref());
        let how = Quantization {
            rows: grads.wants(1),
            cols: grads.wants(0),
            ..quantization.of(MatrixRole::Gradient, SummedDim::Cols)
        };
        let Quantized {
            rows: dy_rows,
            cols: dy_cols,
        } = quantization.operands::<B>(dy.clone(), amax, how);
        if let Some(dy) = dy_cols {
            let w = quantization.weight::<B>(w, &options, LinearPass::Backward, SummedDim::Cols);
            let of = ProductOf::InputGradient;
            let dx = B::quantized_product(dy, w, dtype.into(), of, options.algorithm);
            let dx = match quantization.shards_of(MatrixRole::Input) {
                Some(shards) => {
                    let mut whole = shape;
                    whole[0] *= shards.over.num_ranks();
                    shards.reduce_scattered::<B>(B::float_reshape(dx, whole))
                }
                None => B::float_reshape(dx, shape),
            };
            grads.register(0, dx);
        }
        if let Some(dy) = dy_rows {
            let (out_in, algorithm) = (options.out_in, options.algorithm);
            let operands = move || {
                let x = x.operand::<B>(&quantization);
                if out_in { (dy, x) } else { (x, dy) }
            };
            match options.main_grad.filter(MainGrad::is_attached) {
                Some(main_grad) => run_or_defer(move || {
                    let (a, b) = operands();
                    main_grad
                        .update(|sum, room| B::add_quantized_product(a, b, sum, room(), algorithm));
                }),
                None => {
                    let (a, b) = operands();
                    let of = ProductOf::WeightGradient;
                    let dw = B::quantized_product(a, b, dtype.into(), of, algorithm);
                    grads.register(1, dw);
                }
            }
        }
        if grads.wants(2)
            && let Some(gradient) = bias_gradient::<B>(dy, dtype, options.bias_grad.as_ref())
        {
            grads.register(2, gradient);
        }
    }
}

impl<T: TensorMetadata, Q> SavedOperand<T, Q> {
    /// `q(x)`, `[in, t]`.
    fn operand<B>(self, quantization: &LinearQuantization) -> Q
    where
        B: QuantizedOps<FloatTensorPrimitive = T, Operand = Q>,
    {
        match self {
            Self::Quantized(operand) => operand,
            Self::Shard(own) => {
                let shards = quantization.shards_of(MatrixRole::Input);
                let shards = shards.expect("a shard of the input was saved");
                B::transposed(B::gathered(own, &*shards.over))
            }
            Self::Again { x, amax } => {
                let how = quantization.of(MatrixRole::Input, SummedDim::Rows);
                operand(quantization.operands::<B>(x.rows::<B>(), amax, how).rows)
            }
        }
    }
}

impl Quantization {
    /// The largest magnitude of a matrix, and that of the transformed one if it is transformed for
    /// products that sum over rows.
    pub(super) fn amax<B: QuantizedOps>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let own = B::largest_magnitude(x.clone());
        if !self.recipe.transforms(self.role, SummedDim::Rows) {
            return own;
        }
        let transformed = B::largest_magnitude(self.source::<B>(x, SummedDim::Rows));
        let both = [own, transformed].map(B::wrap::<1>);
        B::unwrap(Tensor::cat(both.to_vec(), 0))
    }
}

impl LinearQuantization {
    /// How a matrix is quantised for the product that sums over `summed`.
    pub(super) fn of(&self, role: MatrixRole, summed: SummedDim) -> Quantization {
        Quantization {
            recipe: self.recipe,
            role,
            rows: summed == SummedDim::Rows,
            cols: summed == SummedDim::Cols,
            random: self.random.clone(),
        }
    }

    /// Quantises a matrix of all tokens, of which this rank may have a shard.
    fn operands<B: QuantizedOps>(
        &self,
        x: FloatTensor<B>,
        amax: Option<FloatTensor<B>>,
        how: Quantization,
    ) -> Quantized<B::Operand> {
        let Some(shards) = self.shards_of(how.role) else {
            return B::quantize_matrix(x, amax, how);
        };
        let of_shard = self.of(how.role, SummedDim::Cols);
        let own = operand(B::quantize_matrix(x, amax, of_shard).cols);
        let all = B::gathered(own, &*shards.over);
        Quantized {
            rows: how.rows.then(|| B::transposed(all.clone())),
            cols: how.cols.then_some(all),
        }
    }

    /// The largest magnitude that the scale of a matrix is derived from, if the recipe needs it.
    /// That of this rank's part may have been found before.
    fn amax<B: QuantizedOps>(
        &self,
        role: MatrixRole,
        x: FloatTensor<B>,
        found: Option<&FoundAmax>,
    ) -> Option<FloatTensor<B>> {
        let how = self.of(role, SummedDim::Rows);
        // What was found is that of the matrix only, not of the transformed one as well.
        let found = found.filter(|_| !self.recipe.transforms(role, SummedDim::Rows));
        let own = |x| {
            let found = found.and_then(FoundAmax::take::<B>);
            found.unwrap_or_else(|| how.amax::<B>(x))
        };
        let needs_amax = self.recipe.needs_amax();
        needs_amax.then(|| self.source(role).of::<B>(x, own))
    }

    /// Counts the elements of a matrix that are lost, if the layer counts them. Inputs and gradients are
    /// quantised along their features, and weights as for the result.
    pub(super) fn count<B: QuantizedOps>(
        &self,
        role: MatrixRole,
        x: &FloatTensor<B>,
        amax: Option<&FloatTensor<B>>,
    ) {
        let Some(counts) = &self.counts else {
            return;
        };
        let summed = match role {
            MatrixRole::Weight => SummedDim::Rows,
            MatrixRole::Input | MatrixRole::Gradient => SummedDim::Cols,
        };
        let is_delayed = matches!(self.source(role), AmaxSource::Delayed(_));
        counts.count::<B>(x, amax, self.of(role, summed), is_delayed);
    }

    /// `q(w)` for the product that sums over a dimension of `[in, out]`. `w` is `[in, out]`, or
    /// `[out, in]` with `out_in`.
    pub(super) fn weight<B: QuantizedOps>(
        &self,
        w: FloatTensor<B>,
        options: &LinearOptions,
        pass: LinearPass,
        summed: SummedDim,
    ) -> B::Operand {
        let main_grad = options.main_grad.as_ref();
        let quantize = |how: Quantization| {
            let w = read_weight::<B>(w.clone(), main_grad, pass);
            let w = if options.out_in { swapped::<B>(w) } else { w };
            let sent = self.sent_amax.clone().map(FoundAmax::new);
            let known = sent.or_else(|| self.weight_amax.clone());
            let amax = self.amax::<B>(MatrixRole::Weight, w.clone(), known.as_ref());
            if pass == LinearPass::Forward {
                self.count::<B>(MatrixRole::Weight, &w, amax.as_ref());
            }
            B::quantize_matrix(w, amax, how)
        };
        let how = self.of(MatrixRole::Weight, summed);
        // A weight that another rank holds is not kept here in another form.
        let is_held = main_grad.is_none_or(|main_grad| !main_grad.has_source());
        let kept = self.kept.as_ref().filter(|kept| is_held && kept.is_kept());
        let found = match kept {
            Some(kept) => kept.get(|| {
                quantize(Quantization {
                    rows: true,
                    cols: true,
                    ..how
                })
            }),
            None => quantize(how),
        };
        operand(match summed {
            SummedDim::Rows => found.rows,
            SummedDim::Cols => found.cols,
        })
    }
}

/// An operand that was asked for.
fn operand<T>(found: Option<T>) -> T {
    found.expect("the backend quantises for all products that it is asked for")
}
