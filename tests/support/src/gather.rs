//! Full parameters, assembled from the shards of all ranks.

use std::collections::BTreeMap;

use megaburn::{
    mesh::ShardSpec,
    parallel::read_params,
    train::{TrainError, Trainer},
};

/// Every parameter of a rank: its path, the local values, and which shard they are.
pub type LocalParams = Vec<(String, Vec<f32>, ShardSpec)>;

/// Every full parameter by path.
pub type FullParams = BTreeMap<String, Vec<f32>>;

/// The parameters of a rank.
///
/// # Errors
/// A parameter that ZeRO-3 has sharded cannot be gathered.
///
/// # Collective
/// Every rank calls it: parameters sharded by ZeRO are all-gathered.
pub fn local_params(trainer: &Trainer) -> Result<LocalParams, TrainError> {
    let spec = |path: &str| trainer.plan().get(path).unwrap().shard.clone();
    let params = read_params(&trainer.full_model()?).into_iter();
    Ok(params
        .map(|(path, data)| {
            let values = data.convert::<f32>().try_to_vec().unwrap();
            (path.clone(), values, spec(&path))
        })
        .collect())
}

/// Assembles the full parameters.
///
/// # Panics
/// If no rank holds an element, if copies differ in any bit, or if padding is not zero.
pub fn gather(ranks: &[LocalParams]) -> FullParams {
    let mut found: BTreeMap<&str, Vec<Option<f32>>> = BTreeMap::new();
    for (path, local, spec) in ranks.iter().flatten() {
        let whole = found
            .entry(path)
            .or_insert_with(|| vec![None; spec.num_global()]);
        let mut padding = vec![true; local.len()];
        for piece in &spec.pieces {
            spec.for_each_run(piece, |from, to, len| {
                padding[from..from + len].fill(false);
                for (copy, value) in whole[to..to + len].iter_mut().zip(&local[from..from + len]) {
                    let first = *copy.get_or_insert(*value);
                    assert_eq!(first.to_bits(), value.to_bits(), "copies of {path} differ");
                }
            });
        }
        let mut padded = local.iter().zip(&padding).filter(|(_, padding)| **padding);
        assert!(
            padded.all(|(value, _)| *value == 0.0),
            "padding of {path} is not zero"
        );
    }
    let whole = |values: Vec<Option<f32>>| values.into_iter().collect::<Option<Vec<f32>>>();
    let named = |(path, values)| {
        (
            String::from(path),
            whole(values).unwrap_or_else(|| panic!("a part of {path} is missing")),
        )
    };
    found.into_iter().map(named).collect()
}

/// `||a - b|| / ||b||`; 0 if both are all zeros, as a shard of padding is.
pub fn relative_distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |value: f64| value * value;
    let distance: f64 = a
        .iter()
        .zip(b)
        .map(|(a, b)| square(f64::from(*a) - f64::from(*b)))
        .sum();
    let norm: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
    (distance / norm.max(f64::MIN_POSITIVE)).sqrt()
}
