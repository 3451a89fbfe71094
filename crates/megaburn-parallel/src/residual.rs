use std::{cell::RefCell, ops::AddAssign};

use burn::tensor::{Device, Tensor};

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
#[derive(Clone, Debug)]
pub struct Residual(RefCell<Terms>);

/// The parts of a residual stream. Reading the stream may add them up, but keeps its value.
#[derive(Clone, Debug)]
struct Terms {
    sum: Tensor<3>,
    /// The term that is still to be added.
    last: Option<Tensor<3>>,
    /// The result of the norm that reads the stream next, if it is already computed.
    normed: Option<Recomputable<3>>,
}

impl Residual {
    /// The stream `sum + last`.
    pub(crate) fn new(sum: Tensor<3>, last: Option<Tensor<3>>) -> Self {
        let normed = None;
        Self(RefCell::new(Terms { sum, last, normed }))
    }

    /// A stream whose next norm is already computed.
    pub(crate) fn with_norm(sum: Tensor<3>, normed: Tensor<3>) -> Self {
        Self(RefCell::new(Terms {
            sum,
            last: None,
            normed: Some(normed.into()),
        }))
    }

    /// The norm of the stream.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`
    pub fn normed(&self, norm: &Norm) -> Recomputable<3> {
        let mut terms = self.0.borrow_mut();
        if let Some(normed) = terms.normed.take() {
            return normed;
        }
        let sum = terms.sum.clone();
        let normed = match terms.last.take() {
            None => norm.forward(sum),
            Some(last) => {
                let (normed, sum) = norm.forward_add(last, sum);
                terms.sum = sum;
                normed
            }
        };
        norm.input(normed, &terms.sum)
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

impl From<Tensor<3>> for Residual {
    fn from(sum: Tensor<3>) -> Self {
        Self::new(sum, None)
    }
}

impl AddAssign<Tensor<3>> for Residual {
    fn add_assign(&mut self, term: Tensor<3>) {
        let terms = self.0.get_mut();
        terms.normed = None;
        if let Some(last) = terms.last.replace(term) {
            terms.sum = terms.sum.clone() + last;
        }
    }
}
