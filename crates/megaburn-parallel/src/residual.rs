use std::{cell::RefCell, ops::AddAssign};

use burn::tensor::{Device, Tensor};
use megaburn_kernels::{FoundAmax, NormAmaxes};

use crate::{norm::Norm, recomputable::Recomputable};

/// The residual stream of a transformer. Its last term is added by the norm that reads it next, so
/// that sum and norm take one pass over memory (and one backward) instead of two.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use megaburn_collective::Group;
/// use megaburn_parallel::{MlpConfig, NormConfig, Residual};
///
/// let (group, device) = (Group::single(0), Device::flex());
/// let norm = NormConfig::rms(8).init(&group, &device);
/// let mlp = MlpConfig::gated(8, 24).with_name("mlp").init(&group, &device)?;
/// let start = Tensor::<3>::random([4, 2, 8], Distribution::Default, &device);
///
/// let mut x = Residual::from(start.clone());
/// x += mlp.forward(x.normed(&norm));
/// let expected = start.clone() + mlp.forward(norm.forward(start));
/// assert_eq!(x.sum().into_data(), expected.into_data());
/// # Ok::<_, megaburn_parallel::ParallelError>(())
/// ```
#[derive(Debug)]
pub struct Residual(RefCell<Terms>);

/// The parts of a residual stream. Reading the stream may add them up, but keeps its value.
#[derive(Clone, Debug)]
struct Terms {
    sum: Tensor<3>,
    /// The term that is still to be added.
    last: Option<Tensor<3>>,
    /// Where the norm that adds `last` puts the largest magnitude of its gradient.
    amax_of_last: Option<FoundAmax>,
    /// The result of the norm that reads the stream next, if it is already computed.
    normed: Option<Recomputable<3>>,
}

impl Residual {
    /// The stream `sum + last`.
    pub(crate) fn new(sum: Tensor<3>, last: Option<Tensor<3>>) -> Self {
        Self(RefCell::new(Terms {
            sum,
            last,
            amax_of_last: None,
            normed: None,
        }))
    }

    /// A stream whose next norm is already computed.
    pub(crate) fn with_norm(sum: Tensor<3>, normed: Tensor<3>) -> Self {
        Self(RefCell::new(Terms {
            sum,
            last: None,
            amax_of_last: None,
            normed: Some(normed.into()),
        }))
    }

    /// Adds a term. The norm that reads the stream next puts the largest magnitude of the term's
    /// gradient into `amax`, if it adds the term. Nothing else may read the term.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`
    pub fn add_observed(&mut self, term: Tensor<3>, amax: Option<FoundAmax>) {
        *self += term;
        self.0.get_mut().amax_of_last = amax;
    }

    /// The norm of the stream.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`
    pub fn normed(&self, norm: &Norm) -> Recomputable<3> {
        self.normed_observed(norm, false)
    }

    /// [`normed`](Self::normed) for a layer that quantises it. With `finds_amax` the norm finds the
    /// largest magnitude for the layer.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`
    pub fn normed_observed(&self, norm: &Norm, finds_amax: bool) -> Recomputable<3> {
        let mut terms = self.0.borrow_mut();
        if let Some(normed) = terms.normed.take() {
            return normed;
        }
        let sum = terms.sum.clone();
        let result = finds_amax.then(FoundAmax::default);
        let mut amaxes = NormAmaxes {
            result: result.clone(),
            gradient: None,
        };
        let normed = match terms.last.take() {
            None => norm.forward_observed(sum, amaxes),
            Some(last) => {
                amaxes.gradient = terms.amax_of_last.take();
                let (normed, sum) = norm.forward_add_observed(last, sum, amaxes);
                terms.sum = sum;
                normed
            }
        };
        norm.input(normed, &terms.sum).with_amax(result)
    }

    /// The stream's value, which stays readable.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`
    pub fn value(&self) -> Tensor<3> {
        let mut terms = self.0.borrow_mut();
        if let Some(last) = terms.last.take() {
            terms.sum = terms.sum.clone() + last;
        }
        terms.sum.clone()
    }

    /// The stream's value off the autodiff device. How it is computed elsewhere does not change.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`
    pub fn peek(&self) -> Tensor<3> {
        let terms = self.0.borrow();
        let plain = |x: &Tensor<3>| match x.device().is_autodiff() {
            true => x.clone().inner(),
            false => x.clone(),
        };
        match &terms.last {
            Some(last) => plain(&terms.sum) + plain(last),
            None => plain(&terms.sum),
        }
    }

    /// The device of the stream.
    pub fn device(&self) -> Device {
        self.0.borrow().sum.device()
    }

    /// The stream's value.
    pub fn sum(self) -> Tensor<3> {
        match self.into_parts() {
            (sum, None) => sum,
            (sum, Some(last)) => sum + last,
        }
    }

    /// The stream without its last term, and that term.
    pub(crate) fn into_parts(self) -> (Tensor<3>, Option<Tensor<3>>) {
        let Terms { sum, last, .. } = self.0.into_inner();
        (sum, last)
    }
}

impl Clone for Residual {
    /// A copy of the stream. The gradient of the last term is then the sum of two, whose largest
    /// magnitude no norm finds.
    fn clone(&self) -> Self {
        let mut terms = self.0.borrow_mut();
        terms.amax_of_last = None;
        Self(RefCell::new(terms.clone()))
    }
}

impl From<Tensor<3>> for Residual {
    fn from(sum: Tensor<3>) -> Self {
        Self::new(sum, None)
    }
}

impl AddAssign<Tensor<3>> for Residual {
    fn add_assign(&mut self, term: Tensor<3>) {
        let terms = self.0.get_mut();
        terms.normed = None;
        terms.amax_of_last = None;
        if let Some(last) = terms.last.replace(term) {
            terms.sum = terms.sum.clone() + last;
        }
    }
}
