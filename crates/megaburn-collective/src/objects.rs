//! Collectives on small values of any type, sent as JSON: for coordination outside of training
//! steps, not for data that every step sends.

use burn::tensor::{DType, TensorData};
use serde::{Serialize, de::DeserializeOwned};

use crate::{error::CollectiveError, group::Group};

/// Gathers every member's value, in rank order, on member 0; the others get an empty list.
///
/// # Errors
/// See [`CollectiveError`].
/// # Collective
/// All members; each sends its text to member 0, in a large group along a tree. All wait for all.
pub fn gather<T: Serialize + DeserializeOwned>(
    group: &Group,
    mine: &T,
) -> Result<Vec<T>, CollectiveError> {
    if group.is_along_tree(0) {
        let parts = group.gather_along_tree(encode(mine))?;
        return Ok(parts.iter().map(|part| decode(part)).collect());
    }
    let mut parts = vec![bytes(Vec::new()); group.size()];
    parts[0] = bytes(encode(mine));
    let parts = group.all_to_all(parts)?;
    if group.rank() != 0 {
        return Ok(Vec::new());
    }
    Ok(parts.iter().map(|part| decode(part.as_bytes())).collect())
}

/// Returns member 0's value on every member.
///
/// # Errors
/// See [`CollectiveError`].
/// # Collective
/// All members; two broadcasts, the text's length and the text.
pub fn broadcast<T: Serialize + DeserializeOwned>(
    group: &Group,
    value: &T,
) -> Result<T, CollectiveError> {
    let mine = encode(value);
    let len = group.broadcast(TensorData::from([mine.len() as i64]), 0)?;
    let len = len.as_slice::<i64>().expect("it was sent as i64")[0] as usize;
    // The others' bytes do not matter, but their number must equal the root's.
    let mine = if group.rank() == 0 || group.is_rehearsal() {
        mine
    } else {
        vec![0; len]
    };
    Ok(decode(group.broadcast(bytes(mine), 0)?.as_bytes()))
}

fn bytes(bytes: Vec<u8>) -> TensorData {
    let len = bytes.len();
    TensorData::from_bytes_vec(bytes, [len], DType::U8)
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("the value is serializable")
}

fn decode<T: DeserializeOwned>(text: &[u8]) -> T {
    serde_json::from_slice(text).expect("it was written by a rank of the same build")
}

#[cfg(test)]
mod tests {
    use crate::{error::CollectiveError, launch::run_threads, objects, options::GroupOptions};

    #[test]
    fn member_0_hears_everyone_and_everyone_hears_member_0() {
        for ranks in [1, 3] {
            let found = run_threads(ranks, GroupOptions::default(), |world| {
                // Texts of unequal lengths, one of them empty.
                let mine = "ä".repeat(7 * world.rank());
                let all = objects::gather(&world, &mine)?;
                let told = objects::broadcast(&world, &(mine.len() + 40, all.clone()))?;
                Ok::<_, CollectiveError>((all, told))
            });
            let expected: Vec<String> = (0..ranks).map(|rank| "ä".repeat(7 * rank)).collect();
            for (rank, found) in found.into_iter().enumerate() {
                let (all, told) = found.unwrap();
                assert_eq!(
                    all,
                    if rank == 0 {
                        expected.clone()
                    } else {
                        Vec::new()
                    }
                );
                assert_eq!(told, (40, expected.clone()));
            }
        }
    }
}
