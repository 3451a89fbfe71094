use burn::tensor::DType;
use megaburn_autograd::testing::{
    assert_close, assert_refused, assert_same_function, constant, leaf, normal, quantized, values,
};
use megaburn_mesh::{PositionRng, Purpose};
use rstest::rstest;

use super::*;
use crate::DropoutKey;

/// `(q, k, v)` for `[s_q, s_k, b, hq, hkv, d]`.
pub(super) fn qkv([s_q, s_k, b, hq, hkv, d]: [usize; 6]) -> (Tensor<4>, Tensor<4>, Tensor<4>) {
    (
        normal([s_q, b, hq, d]),
        normal([s_k, b, hkv, d]),
        normal([s_k, b, hkv, d]),
    )
}

pub(super) fn options(
    causal: bool,
    query_offset: usize,
    window: Option<usize>,
) -> AttentionOptions {
    AttentionOptions {
        causal,
        query_offset,
        window,
        ..Default::default()
    }
}

pub(super) fn packed<const N: usize, const B: usize>(
    queries: [[usize; N]; B],
    keys: [[usize; N]; B],
    options: AttentionOptions,
) -> AttentionOptions {
    let sequences = PackedSequences::new(queries).with_keys(keys);
    AttentionOptions {
        sequences: Some(sequences),
        ..options
    }
}

pub(super) fn packed_from<const N: usize, const M: usize, const B: usize>(
    queries: [[usize; N]; B],
    keys: [[usize; N]; B],
    offsets: [[usize; M]; B],
    options: AttentionOptions,
) -> AttentionOptions {
    let sequences = PackedSequences::new(queries)
        .with_keys(keys)
        .with_offsets(offsets);
    AttentionOptions {
        sequences: Some(sequences),
        ..options
    }
}

pub(super) fn dropped(p: f64, shape: [usize; 4], options: AttentionOptions) -> AttentionOptions {
    let rng = PositionRng::new(7, Purpose::Dropout, "attention").with_stream(2);
    let dropout = Some(AttentionDropout::new(p, DropoutKey::new(rng, &shape)));
    AttentionOptions { dropout, ..options }
}

#[rstest]
#[case::all_keys([6, 6, 2, 4, 2, 8], options(false, 0, None))]
#[case::causal([8, 8, 2, 4, 2, 8], options(true, 0, None))]
#[case::every_head_its_own([5, 5, 3, 3, 3, 6], options(true, 0, None))]
#[case::one_head_of_keys([7, 7, 1, 6, 1, 4], options(true, 0, None))]
#[case::ragged_with_offset([3, 11, 2, 6, 3, 5], options(true, 4, None))]
#[case::last_query([1, 9, 2, 4, 2, 8], options(true, 8, None))]
#[case::fewer_keys_than_queries([9, 4, 1, 2, 1, 4], options(true, 0, None))]
#[case::window([9, 9, 2, 4, 2, 4], options(true, 0, Some(3)))]
#[case::window_with_offset([4, 9, 1, 4, 2, 4], options(true, 5, Some(2)))]
#[case::window_not_causal([6, 6, 1, 2, 2, 4], options(false, 0, Some(2)))]
#[case::queries_beyond_the_window([8, 5, 2, 4, 2, 4], options(true, 2, Some(3)))]
#[case::blocks([80, 80, 1, 4, 2, 4], options(true, 0, None))]
#[case::ragged_blocks([67, 90, 2, 2, 1, 3], options(true, 20, None))]
#[case::blocks_with_window([99, 99, 1, 2, 1, 4], options(true, 0, Some(20)))]
#[case::blocks_without_keys([99, 30, 1, 2, 2, 4], options(true, 3, Some(5)))]
#[case::scale([4, 4, 1, 2, 1, 4], AttentionOptions { scale: Some(0.9), ..AttentionOptions::causal() })]
#[case::soft_cap([9, 9, 2, 4, 2, 8], AttentionOptions { soft_cap: Some(0.7), ..AttentionOptions::causal() })]
#[case::packed([9, 9, 2, 4, 2, 4], packed([[0, 4, 9], [0, 8, 9]], [[0, 4, 9], [0, 8, 9]], options(true, 0, None)))]
#[case::packed_not_causal([9, 9, 2, 2, 1, 4], packed([[0, 4, 9], [0, 8, 9]], [[0, 4, 9], [0, 8, 9]], options(false, 0, None)))]
#[case::packed_with_window([50, 50, 1, 2, 2, 4], packed([[0, 17, 50]], [[0, 17, 50]], options(true, 0, Some(6))))]
#[case::packed_crossed([7, 12, 2, 4, 2, 4], packed([[0, 0, 5, 7], [0, 3, 4, 7]], [[0, 2, 8, 12], [0, 12, 12, 12]], options(true, 3, None)))]
#[case::packed_with_offsets([7, 12, 2, 4, 2, 4], packed_from([[0, 2, 5, 7], [0, 3, 4, 7]], [[0, 6, 9, 12], [0, 3, 9, 12]], [[4, 0, 1], [0, 5, 2]], options(true, 0, None)))]
#[case::packed_with_offsets_and_window([7, 12, 2, 4, 2, 4], packed_from([[0, 2, 5, 7], [0, 3, 4, 7]], [[0, 6, 9, 12], [0, 3, 9, 12]], [[4, 0, 9], [0, 5, 2]], options(true, 1, Some(4))))]
#[case::dropout([6, 7, 2, 4, 2, 4], dropped(0.4, [2, 4, 6, 7], options(false, 0, None)))]
#[case::dropout_in_blocks([70, 70, 1, 2, 1, 4], dropped(0.3, [1, 2, 70, 70], options(true, 0, None)))]
#[case::all_of_it([40, 40, 2, 4, 2, 4], AttentionOptions {
    soft_cap: Some(1.5),
    ..dropped(0.2, [2, 4, 40, 40], packed([[0, 33, 40], [0, 3, 40]], [[0, 33, 40], [0, 3, 40]], options(true, 0, Some(9))))
})]
fn values_and_gradients_are_those_of_the_reference(
    #[case] shape: [usize; 6],
    #[case] options: AttentionOptions,
) {
    let (q, k, v) = qkv(shape);
    assert_same_function!(
        3e-6,
        [q, k, v],
        attention(q.clone(), k.clone(), v.clone(), options.clone()),
        reference::attention(q.clone(), k.clone(), v.clone(), options.clone())
    );
}

#[rstest]
#[case(DType::BF16, 3e-2)]
#[case(DType::F16, 4e-3)]
fn half_precision_is_computed_in_f32(#[case] dtype: DType, #[case] tolerance: f64) {
    let (q, k, v) = qkv([6, 6, 2, 4, 2, 8]);
    let [q, k, v] = [q, k, v].map(|t| leaf(t.cast(dtype)));
    let options = AttentionOptions::causal();
    let y = attention(q.clone(), k.clone(), v.clone(), options.clone());
    assert_eq!(y.dtype(), dtype);
    assert_same_function!(
        tolerance,
        [q, k, v],
        attention(q.clone(), k.clone(), v.clone(), options.clone()),
        reference::attention(q.clone(), k.clone(), v.clone(), options.clone())
    );
}

#[rstest]
#[case::causal([5, 5, 2, 4, 2, 8], options(true, 0, None), 0..1)]
#[case::window_of_one([5, 5, 1, 4, 4, 6], options(true, 0, Some(1)), 0..5)]
fn a_query_that_sees_a_single_key_has_no_gradient(
    #[case] shape: [usize; 6],
    #[case] options: AttentionOptions,
    #[case] single: std::ops::Range<usize>,
) {
    let (q, k, v) = qkv(shape);
    let weight = constant([shape[0], shape[2], shape[3] * shape[5]]);
    let grads = (attention(q.clone(), k, v, options) * weight)
        .sum()
        .backward();
    let grad = q.grad(&grads).unwrap();
    let of_single = grad.clone().narrow(0, single.start, single.len());
    assert!(values(of_single).iter().all(|grad| *grad == 0.0));
    assert!(single.len() == 5 || values(grad).iter().any(|grad| *grad != 0.0));
}

#[test]
fn gradients_are_the_differences_of_values() {
    let (q, k, v) = qkv([3, 4, 1, 2, 1, 2]);
    let [q, k, v] = [q, k, v].map(|t| leaf(t.cast(DType::F64)));
    let weight = constant([3, 1, 4]).cast(DType::F64);
    let loss = |q: Tensor<4>, k: Tensor<4>, v: Tensor<4>| {
        (attention(q, k, v, options(true, 1, None)) * weight.clone()).sum()
    };
    let grads = loss(q.clone(), k.clone(), v.clone()).backward();
    let step = 1e-5;
    for (which, input) in [&q, &k, &v].into_iter().enumerate() {
        let grad = values(input.grad(&grads).unwrap());
        for (i, grad) in grad.into_iter().enumerate() {
            let moved = |by: f64| {
                let mut data = values(input.clone());
                data[i] += by;
                let data = burn::tensor::TensorData::new(data, input.shape());
                let moved = Tensor::from_data(data, (&input.device(), DType::F64));
                let mut inputs = [q.clone(), k.clone(), v.clone()];
                inputs[which] = moved;
                let [q, k, v] = inputs;
                values(loss(q, k, v))[0]
            };
            let slope = (moved(step) - moved(-step)) / (2.0 * step);
            assert!(
                (grad - slope).abs() < 1e-7,
                "input {which}, element {i}: {grad} {slope}"
            );
        }
    }
}

#[test]
fn keys_and_values_may_be_views_and_values_of_another_size() {
    let fused = normal([5, 2, 4, 14]);
    let part = |start, len| fused.clone().narrow(3, start, len);
    let options = AttentionOptions::causal();
    assert_same_function!(
        3e-6,
        [fused],
        attention(part(0, 4), part(4, 4), part(8, 6), options.clone()),
        reference::attention(part(0, 4), part(4, 4), part(8, 6), options.clone())
    );
}

#[test]
fn queries_in_two_parts_with_offsets_give_the_whole() {
    let (q, k, v) = qkv([10, 10, 2, 4, 2, 8]);
    let whole = attention(q.clone(), k.clone(), v.clone(), AttentionOptions::causal());
    let parts = [(0, 6), (6, 4)].map(|(start, len)| {
        let q = q.clone().narrow(0, start, len);
        attention(q, k.clone(), v.clone(), options(true, start, None))
    });
    assert_close(Tensor::cat(parts.to_vec(), 0), whole, 1e-6);
}

#[test]
fn packed_sequences_are_those_attended_one_by_one() {
    let (q, k, v) = qkv([10, 10, 1, 4, 2, 8]);
    let bounds = [0, 3, 4, 10];
    let options = packed([bounds], [bounds], AttentionOptions::causal());
    let whole = attention(q.clone(), k.clone(), v.clone(), options);
    let parts = bounds.windows(2).map(|ends| {
        let [q, k, v] = [&q, &k, &v].map(|x| x.clone().narrow(0, ends[0], ends[1] - ends[0]));
        attention(q, k, v, AttentionOptions::causal())
    });
    assert_close(Tensor::cat(parts.collect(), 0), whole, 1e-6);
}

#[test]
fn heads_and_queries_of_a_rank_drop_what_the_whole_drops() {
    let (q, k, v) = qkv([6, 6, 2, 4, 2, 8]);
    let options = dropped(0.5, [2, 4, 6, 6], options(false, 0, None));
    let whole = attention(q.clone(), k.clone(), v.clone(), options.clone());
    let parts = [(0, 0), (0, 3), (1, 0), (1, 3)].map(|(kv, at)| {
        let q = q.clone().slice([at..at + 3, 0..2, 2 * kv..2 * kv + 2]);
        let [k, v] = [&k, &v].map(|x| x.clone().narrow(2, kv, 1));
        let AttentionDropout { p, key } = options.dropout.clone().unwrap();
        let key = key.with_offset(1, 2 * kv).with_offset(2, at);
        let dropout = Some(AttentionDropout::new(p, key));
        attention(
            q,
            k,
            v,
            AttentionOptions {
                dropout,
                ..options.clone()
            },
        )
    });
    let [a, b, c, d] = parts;
    let found = Tensor::cat(
        vec![Tensor::cat(vec![a, b], 0), Tensor::cat(vec![c, d], 0)],
        2,
    );
    assert_close(found, whole, 1e-6);
}

fn of(shape: [usize; 6], options: AttentionOptions) {
    let (q, k, v) = qkv(shape);
    attention(q, k, v, options);
}

fn with(change: impl FnOnce(&mut AttentionOptions)) {
    let mut options = AttentionOptions::causal();
    change(&mut options);
    of([2, 2, 1, 1, 1, 2], options);
}

#[rstest]
#[case::heads(|| of([2, 2, 1, 4, 3, 2], options(true, 0, None)), "hkv dividing hq")]
#[case::no_queries(|| of([0, 2, 1, 4, 2, 2], options(true, 0, None)), "no empty dimension")]
#[case::no_keys(|| of([2, 0, 1, 4, 2, 2], options(true, 0, None)), "no empty dimension")]
#[case::no_sequences(|| of([2, 2, 0, 4, 2, 2], options(true, 0, None)), "no empty dimension")]
#[case::no_heads(|| of([2, 2, 1, 0, 2, 2], options(true, 0, None)), "no empty dimension")]
#[case::heads_of_nothing(|| of([2, 2, 1, 4, 2, 0], options(true, 0, None)), "no empty dimension")]
#[case::head_dims(
    || drop(attention(normal([2, 1, 2, 8]), normal([2, 1, 2, 4]), normal([2, 1, 2, 8]), options(true, 0, None))),
    "attention: q [2, 1, 2, 8], k [2, 1, 2, 4], v [2, 1, 2, 8] are not"
)]
#[case::keys_and_values(
    || drop(attention(normal([2, 1, 2, 8]), normal([3, 1, 2, 8]), normal([2, 1, 2, 8]), options(true, 0, None))),
    "k [3, 1, 2, 8], v [2, 1, 2, 8] are not"
)]
#[case::dtype(
    || drop(attention(normal([2, 1, 2, 8]), quantized([2, 1, 2, 8]), normal([2, 1, 2, 8]), options(true, 0, None))),
    "attention: k is qfloat"
)]
#[case::cap(|| with(|options| options.soft_cap = Some(0.0)), "soft cap 0 must be greater than 0")]
#[case::nan_cap(|| with(|options| options.soft_cap = Some(f64::NAN)), "soft cap NaN must be greater than 0")]
#[case::scale(|| with(|options| options.scale = Some(f64::NAN)), "scale NaN is not a finite number")]
#[case::offset(|| with(|options| options.query_offset = usize::MAX), "query offset 18446744073709551615 exceeds")]
#[case::sequences(
    || with(|options| options.sequences = Some(PackedSequences::new([[0, 3]]))),
    "cu_seqlens [0, 3] must increase from 0 to the number of queries, 2"
)]
#[case::dropout(
    || with(|options| options.dropout = dropped(0.1, [1, 1, 2, 1], AttentionOptions::default()).dropout),
    "elements 0..2 of dimension 3 are outside [1, 1, 2, 1]"
)]
#[case::probability(|| drop(dropped(1.5, [1, 1, 2, 2], AttentionOptions::default())), "dropout probability 1.5")]
fn bad_input_is_refused(#[case] call: fn(), #[case] message: &str) {
    assert_refused(call, message);
}
