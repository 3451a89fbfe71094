//! Collectives on tensors of a backend.

use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn::collective::{
    CollectiveError, Group, Lane, ReduceOp,
    tensors::{
        CollectiveElement, all_gather, all_gather_in_place, all_reduce, all_to_all, broadcast,
        recv, reduce_scatter, send, shift,
    },
};

use crate::world::{Over, Values, on_ranks};

/// The number of ranks.
const RANKS: usize = 3;

/// What each rank gets from each collective, on tensors of a device.
pub(crate) fn run(over: Over, device: &Device) -> Result<Values, String> {
    let ranks = on_ranks(over, RANKS, 1, |group| {
        let rank = group.rank();
        // Six numbers that only this rank has.
        let numbers: Vec<i64> = (0..6).map(|i| (7 * i + 5 * rank as i64) % 11 - 4).collect();
        let ints = Tensor::<2, Int>::from_data(TensorData::new(numbers, [3, 2]), device);
        let mut found = of_kind(
            "ints",
            ints.clone(),
            &[ReduceOp::Sum, ReduceOp::Max],
            &group,
        )?;
        let all = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Mean];
        found.extend(of_kind("floats", ints.float() / 8.0, &all, &group)?);
        Ok::<_, CollectiveError>(found)
    })?;
    let named = |(rank, found): (usize, Values)| {
        let name =
            move |(name, values): (String, Vec<f32>)| (format!("{name} on rank {rank}"), values);
        found.into_iter().map(name)
    };
    Ok(ranks.into_iter().enumerate().flat_map(named).collect())
}

fn of_kind<K: CollectiveElement>(
    kind: &str,
    x: Tensor<2, K>,
    ops: &[ReduceOp],
    group: &Group,
) -> Result<Values, CollectiveError> {
    let rank = group.rank();
    let lane = Lane::InOrder;
    let mut found = Values::new();
    let mut add = |name: String, data: TensorData| {
        found.insert(format!("{name} of {kind}"), data.iter::<f32>().collect());
    };
    for op in ops {
        let sum = all_reduce(x.clone(), *op, group, lane)?.wait();
        add(format!("all-reduce {op:?}"), sum.into_data());
        let part = reduce_scatter(x.clone(), *op, group, lane)?.wait();
        add(format!("reduce-scatter {op:?}"), part.into_data());
    }
    let gathered = all_gather(x.clone(), group, lane)?.wait();
    add("all-gather".into(), gathered.into_data());
    let whole = all_gather_in_place(x.clone().reshape([6]), group, lane)?.wait();
    add("all-gather in place".into(), whole.into_data());
    let of_last = broadcast(x.clone(), RANKS - 1, group, lane)?.wait();
    add("broadcast".into(), of_last.into_data());
    let shifted = shift(x.clone(), -1, group, lane)?.wait();
    add("shift".into(), shifted.into_data());
    // Rank r sends s rows to rank s, and gets r rows from each.
    let counts: Vec<usize> = (0..RANKS).collect();
    let sent = all_to_all(x.clone(), &counts, &[rank; RANKS], group, lane)?.wait();
    add("all-to-all".into(), sent.into_data());
    match rank {
        0 => send(x, 1, group, lane)?.wait(),
        1 => {
            let place = (&x.device(), x.dtype());
            let got = recv::<2, K>([3, 2], place, 0, group, lane)?.wait();
            add("receive".into(), got.into_data());
        }
        _ => {}
    }
    Ok(found)
}
