use burn::tensor::{DType, TensorData};
use megaburn_collective::Group;
use megaburn_mesh::ShardSpec;
use megaburn_train::TrainError;
use serde::{Deserialize, Serialize};

use crate::rank::RankResult;

/// A [`RankResult`] without the values of its gradients. Numbers are sent as bits, because JSON has
/// no NaN.
#[derive(Serialize, Deserialize)]
struct Header {
    logits: Option<u64>,
    losses: Vec<Vec<u64>>,
    grads: Vec<(String, ShardSpec)>,
}

/// Collects the results of all ranks, in rank order, on rank 0; returns `None` on the others.
///
/// # Collective
/// All ranks.
pub(crate) fn collect(
    world: &Group,
    mine: RankResult,
) -> Result<Option<Vec<RankResult>>, TrainError> {
    if world.rank() != 0 {
        return send(world, mine).map(|()| None);
    }
    let mut all = vec![mine];
    for rank in 1..world.size() {
        all.push(receive(world, rank)?);
    }
    Ok(Some(all))
}

fn send(world: &Group, found: RankResult) -> Result<(), TrainError> {
    let (grads, values): (Vec<_>, Vec<_>) = found
        .grads
        .into_iter()
        .map(|(path, values, spec)| ((path, spec), values))
        .unzip();
    let header = Header {
        logits: found.logits.map(f64::to_bits),
        losses: found
            .losses
            .into_iter()
            .map(|of| of.into_iter().map(f64::to_bits).collect())
            .collect(),
        grads,
    };
    let header = serde_json::to_vec(&header).expect("numbers, names and shards are serializable");
    let shape = [header.len()];
    world.send(TensorData::from_bytes_vec(header, shape, DType::U8), 0)?;
    for values in values {
        let shape = [values.len()];
        world.send(TensorData::new(values, shape), 0)?;
    }
    Ok(())
}

fn receive(world: &Group, rank: usize) -> Result<RankResult, TrainError> {
    let header = world.recv(rank, None, DType::U8)?;
    let Header {
        logits,
        losses,
        grads,
    } = serde_json::from_slice(header.as_bytes()).expect("all ranks run the same program");
    let mut found = RankResult {
        logits: logits.map(f64::from_bits),
        losses: losses
            .into_iter()
            .map(|of| of.into_iter().map(f64::from_bits).collect())
            .collect(),
        grads: Vec::new(),
    };
    for (path, spec) in grads {
        let values = world.recv(rank, None, DType::F32)?;
        found.grads.push((
            path,
            values.try_to_vec().expect("the data was sent as f32"),
            spec,
        ));
    }
    Ok(found)
}
