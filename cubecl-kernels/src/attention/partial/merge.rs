//! The merge of ring attention: attention to one part of the keys after another is accumulated by the
//! log-sum-exp (LSE) of the scores. [`PartialAttention::merge`] has the formula; on GPUs
//! `merge_lse_kernel` computes it.

use burn::tensor::{DType, Tensor};
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::backend_ops::compute_dtype;

use super::partial_attention::{LOWEST, PartialAttention};

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

/// Merges attention to parts of the keys as they arrive, in f32 (f64 for f64). On GPUs each part
/// takes one in-place pass over the queries that it covers.
///
/// ```
/// use burn::tensor::{DType, Device, Distribution, Tensor};
/// use megaburn_kernels::{AttentionOptions, OnlineSoftmaxMerge, partial_attention};
///
/// let x = |s| Tensor::<4>::random([s, 1, 2, 8], Distribution::Default, &Device::flex());
/// let (q, k, v) = (x(4), x(6), x(6));
/// let part = |keys: std::ops::Range<usize>, queries: std::ops::Range<usize>| {
///     let [k, v] = [&k, &v].map(|x| x.clone().slice(keys.clone()));
///     partial_attention(q.clone().slice(queries), k, v, AttentionOptions::default())
/// };
/// let mut sum = OnlineSoftmaxMerge::new([4, 1, 2, 8]);
/// sum.add(0, part(0..2, 0..4));
/// // The last two queries see the other keys too.
/// sum.add(2, part(2..6, 2..4));
/// let found = sum.finish(DType::F32).out.slice(2..4);
/// let apart = (found - part(0..6, 2..4).out).abs().max();
/// assert!(apart.into_scalar::<f32>() < 1e-6);
/// ```
#[derive(Debug)]
pub struct OnlineSoftmaxMerge {
    shape: [usize; 4],
    merged: Option<PartialAttention>,
}

impl OnlineSoftmaxMerge {
    /// The state of queries that have seen no key.
    ///
    /// # Shapes
    /// `shape` is the shape of the result, `[s_q, b, hq, d_v]`.
    pub fn new(shape: [usize; 4]) -> Self {
        Self {
            shape,
            merged: None,
        }
    }

    /// Merges attention of the queries from `start` on to further keys.
    ///
    /// # Panics
    /// If the part has queries that do not exist, other dimensions than the result, or another
    /// dtype than earlier parts.
    pub fn add(&mut self, start: usize, part: PartialAttention) {
        let [s_q, b, hq, d_v] = self.shape;
        let [n, ..] = part.out.dims();
        assert!(
            start + n <= s_q && part.out.dims() == [n, b, hq, d_v] && part.lse.dims() == [b, hq, n],
            "OnlineSoftmaxMerge::add: the part that begins at query {start}, out {:?} and lse \
            {:?}, does not fit {:?}",
            part.out.dims(),
            part.lse.dims(),
            self.shape
        );
        let operands = [float("out", &part.out), float("lse", &part.lse)];
        arg_check::check("OnlineSoftmaxMerge::add", operands);
        self.merged = Some(match self.merged.take() {
            None if n == s_q => PartialAttention {
                out: part.out.cast(compute_dtype(part.lse.dtype())),
                ..part
            },
            merged => add(merged.unwrap_or_else(|| self.nothing(&part)), start, part),
        });
    }

    /// The result in `dtype`, and its LSE.
    ///
    /// # Panics
    /// If nothing was added.
    pub fn finish(self, dtype: DType) -> PartialAttention {
        let PartialAttention { out, lse } = self.merged.expect(
            "OnlineSoftmaxMerge: nothing was \
            added",
        );
        PartialAttention {
            out: out.cast(dtype),
            lse,
        }
    }

    fn nothing(&self, like: &PartialAttention) -> PartialAttention {
        let [s_q, b, hq, d_v] = self.shape;
        let on = (&like.lse.device(), like.lse.dtype());
        PartialAttention {
            out: Tensor::zeros([s_q, b, hq, d_v], on),
            lse: Tensor::full([b, hq, s_q], LOWEST, on),
        }
    }
}

fn add(merged: PartialAttention, start: usize, part: PartialAttention) -> PartialAttention {
    #[cfg(feature = "cuda")]
    if super::launch::merge::takes(&merged, &part) {
        return super::launch::merge::merge_lse(merged, start, part);
    }
    let PartialAttention { out, lse } = merged;
    let [n, b, hq, d_v] = part.out.dims();
    let of_queries = PartialAttention {
        out: out.clone().narrow(0, start, n),
        lse: lse.clone().narrow(2, start, n),
    };
    let both = of_queries.merge(part);
    let queries = start..start + n;
    PartialAttention {
        out: out.slice_assign([queries.clone(), 0..b, 0..hq, 0..d_v], both.out),
        lse: lse.slice_assign([0..b, 0..hq, queries], both.lse),
    }
}

/// Adds `x` to the rows of `sum` from `start` on, in the dtype of `sum`. It does so in place if
/// `sum` has no other owner. Tensors must be without a graph.
///
/// # Shapes
/// `sum: [s, b, h, d]`, `x: [n, b, h, d]`
///
/// # Panics
/// If the rows are out of range, or their shapes differ.
pub fn add_rows(sum: Tensor<4>, start: usize, x: Tensor<4>) -> Tensor<4> {
    let of = sum.dims();
    let [n, rest @ ..] = x.dims();
    assert!(
        start + n <= of[0] && rest == of[1..],
        "add_rows: rows {start}.. of {of:?} cannot take x of shape {:?}",
        x.dims()
    );
    arg_check::check("add_rows", [float("sum", &sum), float("x", &x)]);
    #[cfg(feature = "cuda")]
    if crate::kernel_parts::on_gpu(&sum).is_some() {
        return super::launch::merge::add_rows(sum, start, x);
    }
    let x = x.cast(sum.dtype()) + sum.clone().narrow(0, start, n);
    let [_, b, h, d] = of;
    sum.slice_assign([start..start + n, 0..b, 0..h, 0..d], x)
}

#[cfg(test)]
mod tests {
    use megaburn_autograd::testing::{assert_close, assert_refused, constant};
    use rstest::rstest;

    use super::*;

    fn part([s_q, b, hq, d_v]: [usize; 4]) -> PartialAttention {
        PartialAttention {
            out: constant([s_q, b, hq, d_v]),
            lse: constant([b, hq, s_q]),
        }
    }

    fn stretch(part: &PartialAttention, start: usize, len: usize) -> PartialAttention {
        let PartialAttention { out, lse } = part.clone();
        PartialAttention {
            out: out.narrow(0, start, len),
            lse: lse.narrow(2, start, len),
        }
    }

    #[rstest]
    #[case([7, 2, 4, 6], 0)]
    #[case([5, 1, 3, 8], 2)]
    fn what_is_added_is_merged(#[case] shape: [usize; 4], #[case] start: usize) {
        let parts = [part(shape), part(shape), part(shape)];
        let len = shape[0] - start;
        let mut sum = OnlineSoftmaxMerge::new(shape);
        // The second part is of the queries from `start` on, the third of all queries again.
        sum.add(0, parts[0].clone());
        sum.add(start, stretch(&parts[1], start, len));
        sum.add(0, parts[2].clone());
        let found = sum.finish(DType::F32);
        let [a, b, c] = parts;
        let all = a.clone().merge(b).merge(c.clone());
        let without = a.merge(c);
        let halves = [(all, start, len), (without, 0, start)];
        for (expected, start, len) in halves.into_iter().filter(|(.., len)| *len > 0) {
            let found = stretch(&found, start, len);
            let expected = stretch(&expected, start, len);
            assert_close(found.out, expected.out, 1e-6);
            assert_close(found.lse, expected.lse, 1e-6);
        }
    }

    #[test]
    fn a_first_part_of_some_queries_leaves_the_others_without_keys() {
        let first = part([3, 1, 2, 4]);
        let mut sum = OnlineSoftmaxMerge::new([5, 1, 2, 4]);
        sum.add(2, first.clone());
        let found = sum.finish(DType::F32);
        assert_close(found.out.clone().narrow(0, 2, 3), first.out, 1e-6);
        assert!(
            found
                .out
                .narrow(0, 0, 2)
                .into_data()
                .iter::<f32>()
                .all(|x| x == 0.0)
        );
        assert!(
            found
                .lse
                .narrow(2, 0, 2)
                .into_data()
                .iter::<f32>()
                .all(|x| x < -1e29)
        );
    }

    #[test]
    fn rows_are_added_in_the_dtype_of_the_sum() {
        let sum = constant([5, 2, 1, 3]);
        let x = constant([2, 2, 1, 3]).cast(DType::BF16);
        let found = add_rows(sum.clone(), 3, x.clone());
        assert_close(
            found.clone().narrow(0, 0, 3),
            sum.clone().narrow(0, 0, 3),
            0.0,
        );
        let expected = sum.narrow(0, 3, 2) + x.cast(DType::F32);
        assert_close(found.narrow(0, 3, 2), expected, 0.0);
    }

    #[rstest]
    #[case(|| OnlineSoftmaxMerge::new([4, 1, 2, 8]).add(2, part([3, 1, 2, 8])), "OnlineSoftmaxMerge::add: the part that begins at query 2, out [3, 1, 2, 8]")]
    #[case(|| OnlineSoftmaxMerge::new([4, 1, 2, 8]).add(0, part([4, 2, 2, 8])), "does not fit [4, 1, 2, 8]")]
    #[case(|| drop(OnlineSoftmaxMerge::new([4, 1, 2, 8]).finish(DType::F32)), "nothing was added")]
    #[case(|| drop(add_rows(constant([4, 1, 2, 8]), 3, constant([2, 1, 2, 8]))), "add_rows: rows 3.. of [4, 1, 2, 8] cannot take x of shape [2, 1, 2, 8]")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }

    fn two(out: [usize; 4], lse: [usize; 3]) -> [PartialAttention; 2] {
        let part = |out, lse| PartialAttention {
            out: constant(out),
            lse: constant(lse),
        };
        [part([3, 2, 4, 6], lse), part(out, lse)]
    }

    fn merged(out: [usize; 4], lse: [usize; 3]) {
        let [one, other] = two(out, lse);
        one.merge(other);
    }

    fn of_two_dtypes() {
        let [one, other] = two([3, 2, 4, 6], [2, 4, 3]);
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
    fn parts_that_do_not_match_are_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
