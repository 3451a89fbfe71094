//! Linear maps of ranges of rows whose matrices are quantised, each range with scales of its own:
//! experts.
//!
//! Source: Transformer Engine, `GroupedLinear`, which quantises the rows and the weight of each
//! expert by itself.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata, backend_extension};
use burn::tensor::{DType, FloatDType, Tensor};
use megaburn_autograd::backend_ops::slice_rows;
use megaburn_autograd::{LinearPass, MainGrad, OverlappedWgrads, RecomputeFn, on_every_backend};

use super::amax::AmaxSource;
use super::operands::{ProductOf, Quantization, Quantized, QuantizedOps, RANGE_ALGORITHM};
use super::options::LinearQuantization;
use super::recipe::{MatrixRole, SummedDim};
use crate::linear::{GroupWeight, LinearOptions, put_gradient};

/// The matrices of a grouped linear map and how each is quantised. The recipes are equal.
#[derive(Clone, Debug)]
pub(crate) struct QuantizedGroups {
    pub(crate) rows: Vec<Range<usize>>,
    pub(crate) weights: Vec<GroupWeight>,
    pub(crate) quantizations: Vec<LinearQuantization>,
    /// Whether each weight is trained.
    pub(crate) are_trained: Vec<bool>,
}

/// What backward needs of the input.
#[derive(Clone, Debug, Default)]
pub(crate) struct SavedRows(Arc<Mutex<Option<Box<dyn Any + Send>>>>);

/// The input's rows as operands of the weights' gradients, or the largest magnitudes that the rows
/// had, by which they are quantised when they are recomputed.
enum Rows<B: QuantizedOps> {
    Operands(Vec<Option<B::Operand>>),
    Amaxes(Option<FloatTensor<B>>),
}

/// The backward pass of a grouped linear map.
#[derive(Clone, Debug)]
pub(crate) struct GroupsBackward {
    pub(crate) groups: QuantizedGroups,
    pub(crate) saved: SavedRows,
    pub(crate) again: Option<RecomputeFn>,
    pub(crate) overlapped_wgrads: Option<OverlappedWgrads>,
}

#[backend_extension(
    Cube: cfg(any(feature = "cuda", feature = "wgpu")),
    Flex,
    NdArray: cfg(feature = "ndarray")
)]
pub(crate) trait QuantizedGroupOps: Backend {
    /// The products of the rows and their matrices. If a weight is trained, `saved` receives the
    /// input, or what is needed to quantise it again.
    fn group_products(
        x: FloatTensor<Self>,
        groups: QuantizedGroups,
        saved: SavedRows,
        is_recomputed: bool,
    ) -> FloatTensor<Self>;

    /// The gradient of the input, followed by those of the trained weights that have no
    /// [`MainGrad`].
    fn group_gradients(dy: FloatTensor<Self>, backward: GroupsBackward) -> Vec<FloatTensor<Self>>;
}

on_every_backend! {
    impl QuantizedGroupOps {
        fn group_products(
            x: FloatTensor<Self>,
            groups: QuantizedGroups,
            saved: SavedRows,
            is_recomputed: bool,
        ) -> FloatTensor<Self> {
            let is_trained = groups.are_trained.contains(&true);
            let how = Quantization {
                rows: is_trained && !is_recomputed,
                ..groups.of(MatrixRole::Input, SummedDim::Cols)
            };
            let dtype = TensorMetadata::dtype(&x).into();
            let amaxes = groups.amaxes::<Self>(MatrixRole::Input, x.clone());
            groups.count::<Self>(MatrixRole::Input, &x, amaxes.as_ref());
            let found = Self::quantize_ranges(x, &groups.rows, amaxes.clone(), how);
            let (inputs, rows): (Vec<_>, Vec<_>) = found.into_iter().map(split).unzip();
            if is_trained {
                saved.put::<Self>(match is_recomputed {
                    true => Rows::Amaxes(amaxes),
                    false => Rows::Operands(rows),
                });
            }
            groups.products::<Self>(inputs, LinearPass::Forward, dtype)
        }

        fn group_gradients(
            dy: FloatTensor<Self>,
            backward: GroupsBackward,
        ) -> Vec<FloatTensor<Self>> {
            let GroupsBackward { groups, saved, again, overlapped_wgrads } = backward;
            let is_trained = groups.are_trained.contains(&true);
            let how = Quantization {
                rows: is_trained,
                ..groups.of(MatrixRole::Gradient, SummedDim::Cols)
            };
            let dtype = TensorMetadata::dtype(&dy).into();
            let amaxes = groups.amaxes::<Self>(MatrixRole::Gradient, dy.clone());
            groups.count::<Self>(MatrixRole::Gradient, &dy, amaxes.as_ref());
            let found = Self::quantize_ranges(dy, &groups.rows, amaxes, how);
            let (gradients, dy): (Vec<_>, Vec<_>) = found.into_iter().map(split).unzip();
            let dx = groups.products::<Self>(gradients, LinearPass::Backward, dtype);
            let mut all = vec![dx];
            if is_trained {
                let x = saved.take::<Self>(&groups, again);
                all.extend(groups.weight_gradients::<Self>(x, dy, overlapped_wgrads.as_ref()));
            }
            all
        }
    }
}

/// The operands of a range that sum over its columns and over its rows; none without rows.
fn split<T>(found: Option<Quantized<T>>) -> (Option<T>, Option<T>) {
    match found {
        Some(Quantized { rows, cols }) => (cols, rows),
        None => (None, None),
    }
}

impl QuantizedGroups {
    /// The same matrices in a pass that is not trained on.
    pub(crate) fn without_record(self) -> Self {
        let quantizations = self.quantizations.iter();
        let quantizations = quantizations.map(LinearQuantization::without_record);
        Self {
            quantizations: quantizations.collect(),
            ..self
        }
    }

    /// How a matrix is quantised for the product that sums over `summed`.
    fn of(&self, role: MatrixRole, summed: SummedDim) -> Quantization {
        self.quantizations[0].of(role, summed)
    }

    /// The largest magnitudes that the scales of the ranges are derived from, if the recipe needs
    /// them.
    fn amaxes<B: QuantizedOps>(
        &self,
        role: MatrixRole,
        x: FloatTensor<B>,
    ) -> Option<FloatTensor<B>> {
        let needs_amax = self.quantizations[0].recipe.needs_amax();
        let sources = self.quantizations.iter().map(|of| of.source(role));
        let sources: Vec<&AmaxSource> = sources.collect();
        needs_amax.then(|| {
            let found = B::wrap(B::largest_magnitudes(x, &self.rows));
            B::unwrap(AmaxSource::of_all(&sources, found))
        })
    }

    /// Counts the elements of each range that are lost, where they are counted.
    fn count<B: QuantizedOps>(
        &self,
        role: MatrixRole,
        x: &FloatTensor<B>,
        amaxes: Option<&FloatTensor<B>>,
    ) {
        let ranges = self.rows.iter().zip(&self.quantizations).enumerate();
        for (index, (rows, quantization)) in ranges {
            if rows.is_empty() || quantization.counts.is_none() {
                continue;
            }
            let x = slice_rows::<B>(x.clone(), 0, rows.clone());
            let of = |amaxes: &FloatTensor<B>| slice_rows::<B>(amaxes.clone(), 0, index..index + 1);
            quantization.count::<B>(role, &x, amaxes.map(of).as_ref());
        }
    }

    /// The products of ranges of rows and their matrices, one below the other. Every matrix is
    /// quantised, also that of an empty range, because this may be a collective.
    fn products<B: QuantizedOps>(
        &self,
        ranges: Vec<Option<B::Operand>>,
        pass: LinearPass,
        dtype: FloatDType,
    ) -> FloatTensor<B> {
        let (summed, of) = match pass {
            LinearPass::Forward => (SummedDim::Rows, ProductOf::Result),
            LinearPass::Backward => (SummedDim::Cols, ProductOf::InputGradient),
        };
        let [inputs, outputs] = self.weights[0].weight.dims();
        let columns = match pass {
            LinearPass::Forward => outputs,
            LinearPass::Backward => inputs,
        };
        let weights = self.weights.iter().zip(&self.quantizations);
        let weights = weights.map(|(group, quantization)| {
            let options = LinearOptions {
                main_grad: group.main_grad.clone(),
                ..Default::default()
            };
            if let Some(main_grad) = &group.main_grad {
                main_grad.check("grouped_linear", [inputs, outputs]);
                main_grad.notify_use();
            }
            quantization.weight::<B>(B::unwrap(group.weight.clone()), &options, pass, summed)
        });
        let like = B::unwrap(self.weights[0].weight.clone());
        B::products_of_ranges(
            &like,
            (&self.rows, columns),
            ranges.into_iter().zip(weights),
            dtype,
            of,
        )
    }

    /// `q(x)ᵀ q(dy)` of each trained weight. Those that a [`MainGrad`] receives are left out.
    fn weight_gradients<B: QuantizedOps>(
        &self,
        x: Vec<Option<B::Operand>>,
        dy: Vec<Option<B::Operand>>,
        overlapped_wgrads: Option<&OverlappedWgrads>,
    ) -> Vec<FloatTensor<B>> {
        let mut found = Vec::new();
        let operands = x.into_iter().zip(dy).map(|(x, dy)| x.zip(dy));
        let all = self.weights.iter().zip(operands).zip(&self.are_trained);
        for ((group, operands), _) in all.filter(|(_, is_trained)| **is_trained) {
            let zeros = {
                let (shape, device) = (group.weight.shape(), group.weight.device());
                move |dtype: DType| Tensor::<2>::zeros(shape, (&device, dtype))
            };
            match group.main_grad.clone().filter(MainGrad::is_attached) {
                Some(main_grad) => put_gradient(overlapped_wgrads, move || {
                    main_grad.update(|sum, room| match operands {
                        Some((x, dy)) => {
                            B::add_quantized_product(x, dy, sum, room(), RANGE_ALGORITHM)
                        }
                        None => sum.unwrap_or_else(|| zeros(DType::F32)),
                    });
                }),
                None => {
                    let dtype = group.weight.dtype();
                    found.push(match operands {
                        Some((x, dy)) => {
                            let of = ProductOf::WeightGradient;
                            B::quantized_product(x, dy, dtype.into(), of, RANGE_ALGORITHM)
                        }
                        None => B::unwrap(zeros(dtype)),
                    });
                }
            }
        }
        found
    }
}

impl SavedRows {
    fn put<B: QuantizedOps>(&self, rows: Rows<B>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(rows));
    }

    /// The operands of the weights' gradients.
    fn take<B: QuantizedOps>(
        &self,
        groups: &QuantizedGroups,
        again: Option<RecomputeFn>,
    ) -> Vec<Option<B::Operand>> {
        let saved = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let saved = saved.and_then(|saved| saved.downcast::<Rows<B>>().ok());
        match (saved.map(|saved| *saved), again) {
            (Some(Rows::Amaxes(amaxes)), Some(again)) => {
                let x = B::unwrap(again.compute());
                let how = groups.of(MatrixRole::Input, SummedDim::Rows);
                let found = B::quantize_ranges(x, &groups.rows, amaxes, how);
                found.into_iter().map(|found| split(found).1).collect()
            }
            (Some(Rows::Operands(operands)), _) => operands,
            _ => unreachable!("forward saves the rows of weights that are trained"),
        }
    }
}
