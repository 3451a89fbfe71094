//! All-to-all of rows with a count for each member, compared with the host.

use burn::{
    prelude::Device,
    tensor::{DType, Tensor, TensorData},
};
use megaburn::collective::{Group, Lane, tensors};

use crate::collectives::{Outcome, floats, same, text};

/// Member r sends `(r + 2 m) % 3` rows to member m, which may be none.
pub(crate) fn uneven(world: &Group) -> Outcome {
    let rank = world.rank();
    let n = world.size();
    for (width, dtype) in [(33, DType::BF16), (1, DType::F32), (512, DType::F32)] {
        for round in 0..4 {
            let rows = |from: usize, to: usize| (from + 2 * to + round) % 3;
            let send: Vec<_> = (0..n).map(|to| rows(rank, to)).collect();
            let recv: Vec<_> = (0..n).map(|from| rows(from, rank)).collect();
            let total: usize = send.iter().sum();
            let x = floats(rank, [total, width], dtype);
            let host = x.to_data();
            let got = tensors::all_to_all(x, &send, &recv, world, Lane::InOrder).map_err(text)?;
            let cpu = Tensor::<2>::from_data(host, (&Device::flex(), dtype));
            let want =
                tensors::all_to_all(cpu, &send, &recv, world, Lane::InOrder).map_err(text)?;
            same(
                got.wait().into_data(),
                want.wait().into_data(),
                &format!("{send:?} sent, {recv:?} received"),
            )?;
        }
    }
    let none = vec![0; n];
    let x = floats(rank, [0, 5], DType::F32);
    let got = tensors::all_to_all(x, &none, &none, world, Lane::InOrder).map_err(text)?;
    same(
        got.wait().into_data(),
        TensorData::new(Vec::<f32>::new(), [0, 5]),
        "no rows at all",
    )
}

/// Three row ranges to each member, some empty, which are stored by range and then by member.
pub(crate) fn placed(world: &Group) -> Outcome {
    let rank = world.rank();
    let n = world.size();
    for (width, dtype) in [(33, DType::BF16), (1, DType::F32), (4096, DType::BF16)] {
        for round in 0..4 {
            let len = |from: usize, to: usize, part: usize| (from + 2 * to + 3 * part + round) % 5;
            let places = |pairs: &[(usize, usize)], len: &dyn Fn(usize, usize) -> usize| {
                let mut end = 0;
                let mut places = vec![vec![0..0; 3]; n];
                for &(other, part) in pairs {
                    places[other][part] = end..end + len(other, part);
                    end = places[other][part].end;
                }
                (places, end)
            };
            let mut pairs: Vec<_> = (0..n)
                .flat_map(|other| [0, 1, 2].map(|part| (other, part)))
                .collect();
            let (send, total) = places(&pairs, &|to, part| len(rank, to, part));
            pairs.sort_by_key(|&(other, part)| (part, other));
            let (recv, _) = places(&pairs, &|from, part| len(from, rank, part));
            let x = floats(rank, [total, width], dtype);
            let host = x.to_data();
            let between = |x, send: &[_], recv: &[_]| {
                tensors::all_to_all_ranges(x, send, recv, world, Lane::Overlapped)
                    .map(tensors::Work::wait)
                    .map_err(text)
            };
            let got = between(x, &send, &recv)?;
            let cpu = Tensor::<2>::from_data(host.clone(), (&Device::flex(), dtype));
            let want = between(cpu, &send, &recv)?;
            let what = format!("{send:?} sent, {recv:?} received");
            same(got.to_data(), want.into_data(), &what)?;
            same(
                between(got, &recv, &send)?.into_data(),
                host,
                &format!("{what}, and back"),
            )?;
        }
    }
    Ok(())
}
