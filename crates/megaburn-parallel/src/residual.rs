use std::ops::Add;

use burn::tensor::Tensor;

use crate::{Norm, Recomputable};

/// The residual stream of a transformer. Its last term is added by the norm that reads it next, so
/// that sum and norm take one pass over memory (and one backward) instead of two.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use megaburn_collective::Group;
/// use megaburn_parallel::{NormConfig, Residual};
///
/// let norm = NormConfig::rms(8).init(&Group::single(0), &Device::flex());
/// let x = Tensor::<3>::random([4, 2, 8], Distribution::Default, &Device::flex());
///
/// let stream = Residual::from(x.clone());
/// let (y, stream) = stream.normed(&norm);
/// let y = y.into_tensor();
/// let (z, stream) = (stream + y.clone()).normed(&norm);
/// assert_eq!(stream.sum().into_data(), (x + y).into_data());
/// # assert_eq!(z.dims(), [4, 2, 8]);
/// ```
#[derive(Clone, Debug)]
pub struct Residual {
    sum: Tensor<3>,
    /// The term that is still to be added.
    term: Option<Tensor<3>>,
}

impl Residual {
    /// Applies a norm. Returns the normalized stream, and the stream itself after its last term is
    /// added.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`, unchanged.
    pub fn normed(self, norm: &Norm) -> (Recomputable<3>, Self) {
        let (normed, sum) = match self.term {
            None => (norm.forward(self.sum.clone()), self.sum),
            Some(term) => norm.forward_add(term, self.sum),
        };
        (norm.input(normed, &sum), sum.into())
    }

    /// The stream's value.
    pub fn sum(self) -> Tensor<3> {
        match self.term {
            None => self.sum,
            Some(term) => self.sum + term,
        }
    }

    /// The stream without its last term, and that term.
    pub(crate) fn into_parts(self) -> (Tensor<3>, Option<Tensor<3>>) {
        (self.sum, self.term)
    }
}

impl From<Tensor<3>> for Residual {
    fn from(sum: Tensor<3>) -> Self {
        Self { sum, term: None }
    }
}

impl Add<Tensor<3>> for Residual {
    type Output = Self;

    fn add(self, term: Tensor<3>) -> Self {
        Self {
            sum: self.sum(),
            term: Some(term),
        }
    }
}
