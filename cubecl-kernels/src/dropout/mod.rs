//! Dropout whose mask depends on an element's position in the global tensor, not on the layout.

mod add;
mod fallback;
#[cfg(feature = "cuda")]
mod kernels;
mod key;
#[cfg(feature = "cuda")]
mod launch;
mod op;
pub(crate) mod reference;

use burn::tensor::Tensor;
use megaburn_autograd::arg_check::{self, float};
use megaburn_autograd::fused;

pub use add::bias_dropout_add;
pub use key::DropoutKey;
#[cfg(feature = "cuda")]
pub(crate) use key::kept;
use op::Mask;

/// Sets each element to 0 with probability `p` and divides it by `1 - p` otherwise.
///
/// The key alone decides which elements are kept: seed, path and stream, and each element's index
/// in the global tensor. A rank that holds a shard agrees with a rank that holds the unsharded
/// tensor, and ranks that hold the same shard agree with each other. With `p = 0` the input is
/// returned unchanged. The backward pass regenerates the mask, so the mask is not saved.
///
/// # Shapes
/// - `x`, result: `[..]`, the shard that `key` describes
///
/// # Determinism
/// The result is the same on every device, rank count and thread timing.
///
/// # Panics
/// If `p` is not in `[0, 1)`, or the shard does not lie in the key's global shape.
pub fn dropout<const D: usize>(x: Tensor<D>, p: f64, key: DropoutKey) -> Tensor<D> {
    arg_check::check("dropout", [float("x", &x)]);
    let mask = Mask::new("dropout", p, key, &x.dims());
    if p == 0.0 {
        return x;
    }
    fused(mask, [x.into_dispatch()])
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use megaburn_autograd::testing::{
        assert_refused, assert_same_bits, assert_same_function, constant, leaf, normal, quantized,
        values,
    };
    use megaburn_mesh::{PositionRng, Purpose};
    use rstest::rstest;

    use super::*;

    fn key(path: &str, shape: &[usize]) -> DropoutKey {
        DropoutKey::new(PositionRng::new(11, Purpose::Dropout, path), shape)
    }

    #[rstest]
    fn values_and_gradients_are_those_of_the_reference(
        #[values([8, 2, 16], [5, 3, 7])] shape: [usize; 3],
        #[values((DType::F32, 1e-6), (DType::F16, 2e-3))] (dtype, tolerance): (DType, f64),
    ) {
        let x = leaf(normal(shape).cast(dtype));
        let key = key("layers.0", &shape);
        assert_same_function!(
            tolerance,
            [x],
            dropout(x.clone(), 0.3, key.clone()),
            reference::dropout(x.clone(), 0.3, key.clone())
        );
    }

    #[rstest]
    #[case::sequence(0)]
    #[case::batch(1)]
    #[case::heads(2)]
    fn shards_drop_the_elements_that_the_whole_drops(#[case] dim: usize) {
        let x = constant([6, 4, 10]);
        let whole = dropout(x.clone(), 0.4, key("a", &[6, 4, 10]));
        let len = x.dims()[dim] / 2;
        let shards = (0..2).map(|rank| {
            let key = key("a", &[6, 4, 10]).with_offset(dim, rank * len);
            dropout(x.clone().narrow(dim, rank * len, len), 0.4, key)
        });
        assert_same_bits(Tensor::cat(shards.collect(), dim), whole);
    }

    #[test]
    fn the_share_of_kept_elements_is_one_minus_p_and_the_mean_stays() {
        let ones = constant([64, 4, 64]).ones_like();
        let y = values(dropout(ones, 0.25, key("a", &[64, 4, 64])));
        let kept = y.iter().filter(|&&v| v != 0.0).count() as f64 / y.len() as f64;
        assert!((kept - 0.75).abs() < 0.015, "{kept}");
        assert!(y.iter().all(|&v| v == 0.0 || (v - 4.0 / 3.0).abs() < 1e-6));
    }

    #[test]
    fn paths_and_streams_drop_other_elements() {
        let x = constant([8, 8]);
        let drop = |key| values(dropout(x.clone(), 0.5, key));
        let base = drop(key("a", &[8, 8]));
        assert_eq!(base, drop(key("a", &[8, 8])));
        assert_ne!(base, drop(key("b", &[8, 8])));
        let rng = PositionRng::new(11, Purpose::Dropout, "a").with_stream(1);
        assert_ne!(base, drop(DropoutKey::new(rng, &[8, 8])));
    }

    #[test]
    fn a_probability_of_zero_changes_nothing() {
        let x = constant([3, 5]);
        assert_same_bits(dropout(x.clone(), 0.0, key("a", &[3, 5])), x);
    }

    #[test]
    fn views_drop_what_their_copies_drop() {
        let x = normal([3, 5, 12]);
        let key = key("a", &[5, 3, 8]);
        let view = || x.clone().swap_dims(0, 1).narrow(2, 1, 8);
        assert_same_function!(
            1e-6,
            [x],
            dropout(view(), 0.4, key.clone()),
            reference::dropout(view(), 0.4, key.clone())
        );
    }

    #[test]
    fn nothing_drops_nothing() {
        let x = normal([0, 4]);
        let y = dropout(x.clone(), 0.5, key("a", &[3, 4]));
        assert_eq!(
            (y.dims(), x.grad(&y.sum().backward()).unwrap().dims()),
            ([0, 4], [0, 4])
        );
    }

    #[rstest]
    #[case::one(|| drop(dropout(normal([3, 5]), 1.0, key("a", &[3, 5]))), "dropout: probability 1 is not in [0, 1)")]
    #[case::more(|| drop(dropout(normal([3, 5]), 1.5, key("a", &[3, 5]))), "probability 1.5 is not in [0, 1)")]
    #[case::nan(|| drop(dropout(normal([3, 5]), f64::NAN, key("a", &[3, 5]))), "probability NaN is not in [0, 1)")]
    #[case::dtype(|| drop(dropout(quantized([2, 4]), 0.1, key("a", &[2, 4]))), "dropout: x is qfloat")]
    #[case::rank(|| drop(dropout(normal([3, 5]), 0.1, key("a", &[15]))), "the shard [3, 5] and the global tensor [15]")]
    #[case::outside(
        || drop(dropout(normal([3, 2]), 0.1, key("a", &[3, 5]).with_offset(1, 4))),
        "elements 4..6 of dimension 1 are outside [3, 5]"
    )]
    #[case::far_outside(
        || drop(dropout(normal([3, 2]), 0.1, key("a", &[3, 5]).with_offset(1, usize::MAX))),
        "of dimension 1 are outside [3, 5]"
    )]
    #[case::dim(|| drop(key("a", &[3, 5]).with_offset(2, 0)), "dimension 2 is out of range for a tensor of 2 dimensions")]
    fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
        assert_refused(call, message);
    }
}
