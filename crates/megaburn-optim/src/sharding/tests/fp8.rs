//! Buckets whose weights are sent in FP8: every rank gets the values that a single rank with all
//! weights would round.

use burn::{Tensor, tensor::DType};
use megaburn_kernels::{AmaxReduction, SentAmax, SentScale, largest_magnitude};

use super::*;
use crate::sharding::{
    fp8_message::Fp8Layout,
    fp8_params::{DelayedScale, Fp8Param, Fp8Params},
};

/// The parameters of a bucket: their names, elements, and whether they are sent in FP8.
type Params = [(&'static str, usize, bool)];

const ALL: &Params = &[
    ("a", 1000, true),
    ("b", 515, true),
    ("c", 7, true),
    ("d", 900, true),
];
const MIXED: &Params = &[
    ("a", 700, false),
    ("b", 1515, true),
    ("c", 700, true),
    ("d", 90, false),
];

/// The values of a parameter; each has another largest magnitude, in its second half.
fn value(path: &str, len: usize) -> Tensor<1> {
    let of = f32::from(path.as_bytes()[0] - b'a') + 1.0;
    let number = |i: usize| (i as f32 * 0.37 + of).sin() * of * (1.0 + i as f32 / len as f32);
    let numbers: Vec<f32> = (0..len).map(number).collect();
    Tensor::<1>::from_floats(numbers.as_slice(), &Device::flex()).cast(DType::BF16)
}

fn bits(x: Tensor<1>) -> Vec<u32> {
    let values = crate::testing::values(x.cast(DType::F32));
    values.into_iter().map(f32::to_bits).collect()
}

fn buckets(params: &Params, ranks: usize) -> Bucket {
    let params = params.iter().map(|(path, len, _)| (path.to_string(), *len));
    Bucket::fill(ParamKind::Dense, 0, params, 1 << 20, ranks).remove(0)
}

/// How the weights of a bucket are sent.
#[derive(Clone, Copy)]
struct Sent {
    power_of_two: bool,
    /// The largest magnitudes of the earlier steps and of the current step.
    delayed: Option<[f32; 2]>,
    /// The factor of the largest magnitude that other ranks find.
    others: f32,
}

const SENT: Sent = Sent {
    power_of_two: false,
    delayed: None,
    others: 1.0,
};

/// What every rank receives of each parameter, and the magnitude that its layer is given.
fn received(params: &Params, ranks: usize, sent: Sent) -> Vec<BTreeMap<String, [Vec<u32>; 2]>> {
    let results = run_threads(ranks, GroupOptions::default(), |world| {
        let bucket = buckets(params, ranks);
        let device = Device::flex();
        let amaxes = params.iter().map(|(path, ..)| (*path, SentAmax::default()));
        let amaxes: BTreeMap<_, _> = amaxes.collect();
        let param = |path: &str| Fp8Param {
            sent_amax: amaxes[path].clone(),
            reduction: Some(AmaxReduction::new(move |found| found * sent.others)),
            power_of_two: sent.power_of_two,
            delayed: sent.delayed.map(|[before, current]| DelayedScale {
                current: Some(Tensor::from_floats([current], &Device::flex())),
                before,
                factor: 2.0,
            }),
        };
        let fp8 = Fp8Params::default();
        let in_fp8 = params.iter().filter(|(.., is_fp8)| *is_fp8);
        fp8.set_next(
            in_fp8
                .map(|(path, ..)| (path.to_string(), param(path)))
                .collect(),
        );
        let zeros = |len| Tensor::zeros([len], (&device, DType::BF16));
        let range = bucket.share(world.rank(), ranks);
        let part = |slot: &Slot, range: Range<usize>| {
            value(&slot.path, slot.len).narrow(0, range.start, range.len())
        };
        let share = bucket.join(range.clone(), part, zeros);
        let message = fp8.message(&bucket, &world, (&share, range.start))?;
        let message = message.expect("it is smaller");
        let whole = SentBucket::of_message(&message, &world, zeros(bucket.len))?.wait();
        let found = bucket.slots.iter().map(|slot| {
            let value = whole.clone().narrow(0, slot.start, slot.len);
            let amax = fp8.sent_amax(&slot.path).map(bits).unwrap_or_default();
            (slot.path.clone(), [bits(value), amax])
        });
        Ok::<_, OptimError>(found.collect())
    });
    results.into_iter().map(Result::unwrap).collect()
}

/// The values of a parameter after one rank with all of it rounded it by a magnitude.
fn rounded(path: &str, len: usize, power_of_two: bool, amax: Tensor<1>) -> Vec<u32> {
    let scale = SentScale { amax, power_of_two };
    let packed = scale.packed(value(path, len), None);
    bits(scale.unpacked(packed, len, None))
}

#[rstest]
fn all_ranks_receive_what_one_rank_rounds(
    #[values(ALL, MIXED)] params: &Params,
    #[values(2, 3)] ranks: usize,
    #[values(false, true)] power_of_two: bool,
) {
    let sent = Sent {
        power_of_two,
        ..SENT
    };
    for found in received(params, ranks, sent) {
        for (path, len, is_fp8) in params {
            let [value_found, amax_found] = &found[*path];
            let amax = largest_magnitude(value(path, *len));
            let (expected, given) = match is_fp8 {
                true => (rounded(path, *len, power_of_two, amax.clone()), bits(amax)),
                false => (bits(value(path, *len)), Vec::new()),
            };
            assert_eq!(*value_found, expected, "{path}");
            assert_eq!(*amax_found, given, "{path}");
        }
    }
}

/// The test above would notice magnitudes that are not reduced: a rank's part has another one.
#[test]
fn the_magnitude_of_one_rank_alone_gives_other_values() {
    for (path, len, _) in &ALL[..2] {
        let own = largest_magnitude(value(path, *len).narrow(0, 0, len / 2));
        let all = largest_magnitude(value(path, *len));
        assert_ne!(
            rounded(path, *len, false, own),
            rounded(path, *len, false, all)
        );
    }
}

/// The scale follows the steps before, or the weight if it was zero in all of them; and the
/// magnitude that other ranks find of their parts.
#[rstest]
#[case([0.5, 0.25], 1.0)]
#[case([0.125, 3.0], 6.0)]
#[case([0.0, 0.0], 0.0)]
fn scales_follow_the_steps_before(#[case] delayed: [f32; 2], #[case] derived: f32) {
    for others in [1.0, 4.0] {
        let sent = Sent {
            delayed: Some(delayed),
            others,
            ..SENT
        };
        let found = received(ALL, 2, sent);
        assert_eq!(found[0], found[1]);
        for (path, len, _) in ALL {
            let own = largest_magnitude(value(path, *len)) * others;
            let current = (delayed[1] * others).max(delayed[0]) * 2.0;
            let amax = match derived > 0.0 {
                true => Tensor::from_floats([current], &Device::flex()),
                false => own.clone(),
            };
            let [value, given] = &found[0][*path];
            assert_eq!(*value, rounded(path, *len, false, amax), "{path}");
            assert_eq!(*given, bits(own), "{path}");
        }
    }
}

/// A message is not sent if it is as long as the bucket, because the parts that stay in bf16 are
/// those of one rank.
#[test]
fn a_bucket_that_would_not_become_smaller_is_sent_as_it_is() {
    let params: &Params = &[("a", 2048, false), ("b", 2048, true)];
    let bucket = buckets(params, 2);
    let layout = |ranks| Fp8Layout::new(&bucket, ranks, |path| path == "b");
    assert!(layout(2).is_none());
    assert!(layout(1).is_some());
    assert!(Fp8Layout::new(&bucket, 1, |_| false).is_none());
}
