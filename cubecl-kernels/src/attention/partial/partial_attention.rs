use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};

/// The result of attention to some of the keys, with the LSE that is needed to merge it with
/// attention to others.
#[derive(Clone, Debug)]
pub struct PartialAttention {
    /// The result over these keys only, `[s_q, b, hq, d_v]`.
    pub out: Tensor<4>,
    /// The LSE of the scores, `[b, hq, s_q]` in f32 (f64 for f64); minus infinity for a query that
    /// sees no key.
    pub lse: Tensor<3>,
}

impl PartialAttention {
    /// Merges two partial attentions over disjoint keys into attention to all of them. The result
    /// has the dtype of the LSE.
    ///
    /// # Shapes
    /// Both have the same shapes.
    ///
    /// # Panics
    /// If the shapes, or the dtypes of the LSE, differ.
    pub fn merge(self, other: Self) -> Self {
        let shapes = |part: &Self| (part.out.dims(), part.lse.dims());
        assert_eq!(
            shapes(&self),
            shapes(&other),
            "PartialAttention::merge: the shapes of the parts differ"
        );
        let ([s_q, b, hq, _], of_lse) = shapes(&self);
        assert_eq!(
            of_lse,
            [b, hq, s_q],
            "PartialAttention::merge: lse must be [b, hq, s_q] of out"
        );
        let dtypes = [self.lse.dtype(), other.lse.dtype()];
        assert_eq!(
            dtypes[0], dtypes[1],
            "PartialAttention::merge: the dtypes of the LSEs differ"
        );
        let operands = [&self, &other].map(|x| [float("out", &x.out), float("lse", &x.lse)]);
        arg_check::check("PartialAttention::merge", operands.into_iter().flatten());
        let highest = self
            .lse
            .clone()
            .max_pair(other.lse.clone())
            .clamp_min(LOWEST);
        let weights = [&self, &other].map(|part| (part.lse.clone() - highest.clone()).exp());
        let [a, b] = weights.each_ref().map(Clone::clone);
        let sum = a + b;
        // If neither part sees a key, this avoids 0 / 0.
        let over = sum.clone().clamp_min(f32::MIN_POSITIVE);
        let dtype = sum.dtype();
        let parts = [self.out, other.out].into_iter().zip(weights);
        let mut outs = parts.map(|(out, weight)| {
            let share = (weight / over.clone()).permute([2, 0, 1]);
            out.cast(dtype) * share.unsqueeze_dim(3)
        });
        let both = "there are two parts";
        let out = outs.next().expect(both) + outs.next().expect(both);
        Self {
            out,
            lse: sum.log() + highest,
        }
    }
}

/// Replaces minus infinity where it would be subtracted from itself.
pub(super) const LOWEST: f64 = -1e30;

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use megaburn_autograd::testing::{assert_refused, constant};
    use rstest::rstest;

    use super::*;

    fn part(out: [usize; 4], lse: [usize; 3]) -> PartialAttention {
        PartialAttention {
            out: constant(out),
            lse: constant(lse),
        }
    }

    fn merged(out: [usize; 4], lse: [usize; 3]) {
        part([3, 2, 4, 6], lse).merge(part(out, lse));
    }

    fn of_two_dtypes() {
        let [one, other] = [0; 2].map(|_| part([3, 2, 4, 6], [2, 4, 3]));
        one.merge(PartialAttention {
            lse: other.lse.cast(DType::F64),
            ..other
        });
    }

    #[rstest]
    #[case(|| merged([3, 2, 4, 8], [2, 4, 3]), "PartialAttention::merge: the shapes of the parts \
        differ")]
    #[case(|| merged([3, 2, 4, 6], [2, 4, 1]), "lse must be [b, hq, s_q] of out")]
    #[case(of_two_dtypes, "the dtypes of the LSEs differ")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
