use burn::tensor::{DType, Device, Int, Tensor};

use super::*;
use crate::{launch::run_threads, options::GroupOptions};

#[test]
fn tensors_of_the_host_go_through_the_host() {
    let results = run_threads(3, GroupOptions::default(), |group| {
        let device = Device::flex();
        let me = group.rank() as f32;
        let x = Tensor::<2>::from_data([[me, 1.0], [2.0 * me, -1.0], [3.0, me]], &device);
        let sum = all_reduce(x.clone(), ReduceOp::Sum, &group, Lane::InOrder)?.wait();
        assert_eq!(
            sum.to_data(),
            [[3.0f32, 3.0], [6.0, -3.0], [9.0, 3.0]].into()
        );
        let later = all_reduce(x.clone(), ReduceOp::Sum, &group, Lane::Overlapped)?;
        assert_eq!(later.wait().to_data(), sum.to_data());
        let share = reduce_scatter(x.clone(), ReduceOp::Sum, &group, Lane::InOrder)?;
        let whole = all_gather(share.wait(), &group, Lane::InOrder)?.wait();
        assert_eq!(whole.to_data(), sum.to_data());
        let first = broadcast(x, 1, &group, Lane::InOrder)?.wait();
        assert_eq!(
            first.to_data(),
            [[1.0f32, 1.0], [2.0, -1.0], [3.0, 1.0]].into()
        );
        let next = (group.rank() + 1) % 3;
        let mine = Tensor::<1, Int>::from_data([group.rank() as i64, 7], &device);
        let dtype = mine.dtype();
        send(mine, next, &group, Lane::InOrder)?.wait();
        let from = (group.rank() + 2) % 3;
        let got = recv::<1, Int>([2], (&device, dtype), from, &group, Lane::InOrder)?;
        let got = got.wait().into_data_dtype(DType::I64);
        assert_eq!(got, [from as i64, 7].into());
        for (by, from) in [
            (1, (group.rank() + 2) % 3),
            (-2, (group.rank() + 2) % 3),
            (3, group.rank()),
        ] {
            let mine = Tensor::<1>::from_data([group.rank() as f32, 0.5], &device);
            let came = shift(mine, by, &group, Lane::Overlapped)?.wait();
            assert_eq!(came.into_data(), [from as f32, 0.5].into(), "by {by}");
        }
        Ok::<_, CollectiveError>(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn rows_go_where_they_are_counted_for() {
    // Member r sends r + m rows to member m; every element encodes both numbers.
    let results = run_threads(3, GroupOptions::default(), |group| {
        let device = Device::flex();
        let rank = group.rank();
        let rows = |from: usize, to: usize| vec![(10 * from + to) as f32; 2 * (from + to)];
        let joined = |parts: Vec<Vec<f32>>| {
            let parts = parts.concat();
            let count = parts.len() / 2;
            Tensor::<2>::from_data(TensorData::new(parts, [count, 2]), &device)
        };
        let x = joined((0..3).map(|to| rows(rank, to)).collect());
        let [send, recv] = [0, 0].map(|_| (0..3).map(|other| rank + other).collect::<Vec<_>>());
        let got = all_to_all(x, &send, &recv, &group, Lane::InOrder)?.wait();
        let expected = joined((0..3).map(|from| rows(from, rank)).collect());
        assert_eq!(got.into_data(), expected.into_data());
        Ok::<_, CollectiveError>(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn counts_that_do_not_fit_are_refused_on_every_rank() {
    let results = run_threads(2, GroupOptions::default(), |group| {
        let x = Tensor::<2>::ones([4, 3], &Device::flex());
        Ok::<_, CollectiveError>(
            all_to_all(x, &[1, 2], &[2, 2], &group, Lane::InOrder)
                .unwrap_err()
                .to_string(),
        )
    });
    for result in results {
        let text = result.unwrap();
        assert!(
            text.contains("[[0..1], [1..3]]") && text.contains("4 rows"),
            "{text}"
        );
    }
}

#[test]
fn rows_go_to_where_they_are_wanted() {
    // Each member sends two ranges to each member m, of r + m rows and of 1 row. The result is
    // ordered by range first and by member second.
    let results = run_threads(3, GroupOptions::default(), |group| {
        let device = Device::flex();
        let lens = |from: usize, to: usize| [from + to, 1];
        let rows = |from, to, part: usize| {
            vec![(100 * from + 10 * to + part) as f32; 2 * lens(from, to)[part]]
        };
        let joined = |parts: Vec<Vec<f32>>| {
            let parts = parts.concat();
            let count = parts.len() / 2;
            Tensor::<2>::from_data(TensorData::new(parts, [count, 2]), &device)
        };
        let me = group.rank();
        let by_member = |(to, part)| rows(me, to, part);
        let mut pairs: Vec<_> = (0..3)
            .flat_map(|other| [0, 1].map(|part| (other, part)))
            .collect();
        let x = joined(pairs.iter().copied().map(by_member).collect());
        let places = |pairs: &[(usize, usize)]| {
            let mut end = 0;
            let mut places = vec![vec![0..0; 2]; 3];
            for &(other, part) in pairs {
                let start = end;
                end += lens(me, other)[part];
                places[other][part] = start..end;
            }
            places
        };
        let send = places(&pairs);
        pairs.sort_by_key(|&(other, part)| (part, other));
        let recv = places(&pairs);
        let got = all_to_all_ranges(x.clone(), &send, &recv, &group, Lane::Overlapped)?.wait();
        let expected = joined(
            pairs
                .iter()
                .map(|&(from, part)| rows(from, me, part))
                .collect(),
        );
        assert_eq!(got.clone().into_data(), expected.into_data());
        let back = all_to_all_ranges(got, &recv, &send, &group, Lane::Overlapped)?.wait();
        assert_eq!(back.into_data(), x.into_data());
        Ok::<_, CollectiveError>(())
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
#[expect(clippy::single_range_in_vec_init, reason = "a member has one stretch")]
fn stretches_that_do_not_hold_each_row_once_are_refused_on_every_rank() {
    let all = [vec![0..1], vec![1..3]];
    let twice = [vec![0..2], vec![1..3]];
    for (send, recv) in [(&all, &twice), (&twice, &all)] {
        let results = run_threads(2, GroupOptions::default(), |group| {
            let x = Tensor::<2>::ones([3, 2], &Device::flex());
            let refused = all_to_all_ranges(x, send, recv, &group, Lane::Overlapped)
                .err()
                .unwrap();
            Ok::<_, CollectiveError>(refused.to_string())
        });
        for result in results {
            let text = result.unwrap();
            assert!(
                text.contains("[[0..2], [1..3]]") && text.contains("3 rows"),
                "{text}"
            );
        }
    }
}

#[test]
fn a_group_of_one_gives_back_what_it_gets() {
    let x = Tensor::<1>::from_data([1.0f32, 2.0], &Device::flex());
    let group = Group::single(0);
    let y = all_reduce(x.clone(), ReduceOp::Max, &group, Lane::InOrder)
        .unwrap()
        .wait();
    let z = all_to_all(x.clone(), &[2], &[2], &group, Lane::InOrder)
        .unwrap()
        .wait();
    assert_eq!((y.to_data(), z.to_data()), (x.to_data(), x.to_data()));
}

#[test]
fn what_others_have_is_gathered_around_the_own_stretch() {
    for (len, size) in [(12, 3), (3, 3), (0, 2), (5, 1), (4096, 2)] {
        let results = run_threads(size, GroupOptions::default(), |group| {
            let share = len / size;
            let nan = vec![f32::NAN; len];
            let own = group.rank() * share..(group.rank() + 1) * share;
            // Elements outside of the own shard are NaN and must not show up in the result.
            let mut values = nan;
            own.clone().for_each(|i| values[i] = (i * i) as f32);
            let whole = Tensor::<1>::from_data(TensorData::new(values, [len]), &Device::flex());
            let started = all_gather_in_place(whole, &group, Lane::Overlapped)?;
            let expected: Vec<f32> = (0..len).map(|i| (i * i) as f32).collect();
            assert_eq!(started.wait().into_data(), TensorData::new(expected, [len]));
            Ok::<_, CollectiveError>(())
        });
        results.into_iter().for_each(|result| result.unwrap());
    }
}

#[test]
fn stretches_that_are_not_equal_are_refused() {
    let results = run_threads(2, GroupOptions::default(), |group| {
        let whole = Tensor::<1>::ones([5], &Device::flex());
        Ok::<_, CollectiveError>(
            all_gather_in_place(whole, &group, Lane::Overlapped)
                .unwrap_err()
                .to_string(),
        )
    });
    for result in results {
        let text = result.unwrap();
        assert!(
            text.contains("5 elements") && text.contains("2 members"),
            "{text}"
        );
    }
}
