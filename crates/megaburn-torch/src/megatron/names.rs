use std::fmt;

/// The name of the file that says which iteration is the newest.
pub(super) const LATEST: &str = "latest_checkpointed_iteration.txt";

/// The name of the folder of an iteration, such as `iter_0000010`.
pub fn iteration_folder(iteration: u64) -> String {
    format!("iter_{iteration:07}")
}

/// The key of a `ShardedObject`: one part of an object that has a part for each rank or layer.
///
/// Its text is the name of the entry, such as `rng_state/shard_0.1_2.2`.
///
/// Source: Megatron-Core, `dist_checkpointing/mapping.py`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ShardedKey {
    /// The key that all parts have.
    pub key: String,
    /// Which part it is.
    pub offset: Vec<usize>,
    /// The number of parts in each dim.
    pub shape: Vec<usize>,
}

impl ShardedKey {
    /// The key of the only part of an object.
    pub fn single(key: &str) -> Self {
        Self {
            key: key.into(),
            offset: vec![0],
            shape: vec![1],
        }
    }

    /// Reads the name of an entry; `None` if it is another name.
    pub fn parse(name: &str) -> Option<Self> {
        let (key, shard) = name.rsplit_once("/shard_")?;
        let (offset, shape) = shard.split_once('_')?;
        let numbers = |text: &str| -> Option<Vec<usize>> {
            text.split('.').map(|number| number.parse().ok()).collect()
        };
        let (offset, shape) = (numbers(offset)?, numbers(shape)?);
        let is_inside = offset.len() == shape.len()
            && offset.iter().zip(&shape).all(|(offset, len)| offset < len);
        is_inside.then(|| Self {
            key: key.into(),
            offset,
            shape,
        })
    }
}

impl fmt::Display for ShardedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = |numbers: &[usize]| {
            let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
            numbers.join(".")
        };
        let (offset, shape) = (numbers(&self.offset), numbers(&self.shape));
        write!(f, "{}/shard_{offset}_{shape}", self.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_and_written() {
        assert_eq!(iteration_folder(10), "iter_0000010");
        for name in ["rng_state/shard_0.1_2.2", "a._extra_state/shard_1_2"] {
            assert_eq!(ShardedKey::parse(name).unwrap().to_string(), name);
        }
        let key = ShardedKey::parse("rng_state/shard_0.1_2.3").unwrap();
        assert_eq!((key.offset, key.shape), (vec![0, 1], vec![2, 3]));
        assert_eq!(ShardedKey::single("a").to_string(), "a/shard_0_1");
        for name in [
            "rng_state",
            "a/shard_0",
            "a/shard_1_1",
            "a/shard_0.0_1",
            "a/shard_x_1",
        ] {
            assert_eq!(ShardedKey::parse(name), None, "{name}");
        }
    }
}
