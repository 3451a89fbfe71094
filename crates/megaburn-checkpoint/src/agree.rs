//! Small messages between all ranks: member 0 hears everyone and tells everyone.

use burn::tensor::{DType, TensorData};
use megaburn_collective::{CollectiveError, Group};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::CheckpointError;

/// The first failure of any rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) rank: usize,
    pub(crate) message: String,
}

/// Whether all ranks came through: none, or the failure of the lowest rank that did not. The
/// answer is the same on every rank.
///
/// # Collective
/// All members; a few bytes.
pub(crate) fn first_failure(
    world: &Group,
    mine: Option<&CheckpointError>,
) -> Result<Option<Failure>, CollectiveError> {
    let mine = mine.map(ToString::to_string);
    let all: Vec<Option<String>> = gather(world, &mine)?;
    let failed = |(rank, message): (usize, Option<String>)| {
        message.map(|message| Failure { rank: world.members()[rank], message })
    };
    let first = all.into_iter().enumerate().find_map(failed);
    broadcast(world, &first)
}

/// Turns one rank's result into everyone's: a rank that failed keeps its own error, the others get
/// an error that carries it.
///
/// # Collective
/// All members; a few bytes.
pub(crate) fn settle<T>(
    world: &Group,
    mine: Result<T, CheckpointError>,
) -> Result<T, CheckpointError> {
    let failure = first_failure(world, mine.as_ref().err())?;
    let value = mine?;
    match failure {
        Some(Failure { rank, message }) => Err(CheckpointError::Peer { rank, message }),
        None => Ok(value),
    }
}

/// What every rank holds, in rank order, on member 0; nothing on the others.
pub(crate) fn gather<T: Serialize + DeserializeOwned>(
    world: &Group,
    mine: &T,
) -> Result<Vec<T>, CollectiveError> {
    let mut parts = vec![bytes(Vec::new()); world.size()];
    parts[0] = bytes(encode(mine));
    let parts = world.all_to_all(parts)?;
    if world.rank() != 0 {
        return Ok(Vec::new());
    }
    Ok(parts.iter().map(|part| decode(part.as_bytes())).collect())
}

/// What member 0 holds, on every rank.
pub(crate) fn broadcast<T: Serialize + DeserializeOwned>(
    world: &Group,
    value: &T,
) -> Result<T, CollectiveError> {
    let mine = encode(value);
    let len = world.broadcast(TensorData::from([mine.len() as i64]), 0)?;
    let len = len.as_slice::<i64>().expect("it was sent as i64")[0] as usize;
    // The others' bytes do not matter, but their number must be the root's.
    let mine = if world.rank() == 0 { mine } else { vec![0; len] };
    Ok(decode(world.broadcast(bytes(mine), 0)?.as_bytes()))
}

fn bytes(bytes: Vec<u8>) -> TensorData {
    let len = bytes.len();
    TensorData::from_bytes_vec(bytes, [len], DType::U8)
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("our own types have a text")
}

fn decode<T: DeserializeOwned>(text: &[u8]) -> T {
    serde_json::from_slice(text).expect("a rank of the same build wrote it")
}
