use std::collections::HashMap;

use megaburn_torch::megatron::{MegatronDir, OptimizerBucket};

use super::{
    places::{Places, Shard},
    refused::refused,
    split::Split,
};
use crate::megatron::{error::MegatronError, parameter::Parameter};

/// The buckets of a checkpoint, and where the parameters of a model are in them.
#[derive(Debug)]
pub(in crate::megatron) struct Buckets {
    buckets: Vec<OptimizerBucket>,
    places: HashMap<String, Places>,
}

impl Buckets {
    /// The buckets in which each parameter has the place of the same index.
    pub(super) fn new(
        buckets: &[OptimizerBucket],
        parameters: &[Parameter],
        places: Vec<Places>,
    ) -> Self {
        let paths = parameters.iter().map(|parameter| parameter.path.clone());
        Self {
            buckets: buckets.to_vec(),
            places: paths.zip(places).collect(),
        }
    }

    /// The name of the tensor that has the first shard of a copy.
    pub(super) fn tensor(&self, copy: &[Shard], state: &str) -> String {
        let bucket = copy.first().map(|shard| &self.buckets[shard.bucket]);
        bucket.map_or_else(String::new, |bucket| bucket.tensor(state))
    }

    /// Reads a state of a parameter in f32, in the order of its tensor in the model: `param`,
    /// `exp_avg` or `exp_avg_sq`.
    ///
    /// # Errors
    /// A file is missing, damaged or cannot be read.
    pub(in crate::megatron) fn read(
        &self,
        dir: &MegatronDir,
        parameter: &Parameter,
        state: &str,
    ) -> Result<Vec<u8>, MegatronError> {
        // The other copies are those of ranks which hold the same parameter.
        let (split, copies) = self.copies(dir, parameter)?;
        self.read_copy(dir, parameter, split, &copies[0], state)
    }

    /// The copies of a parameter, of which there is at least one, and how each is divided.
    pub(super) fn copies(
        &self,
        dir: &MegatronDir,
        parameter: &Parameter,
    ) -> Result<(Split, &[Vec<Shard>]), MegatronError> {
        let found = self.places.get(&parameter.path);
        match found.filter(|places| !places.copies.is_empty()) {
            Some(places) => Ok((places.split, &places.copies)),
            None => {
                let why = format!("do not have `{}`", parameter.theirs);
                Err(refused(dir.dcp().path(), why))
            }
        }
    }

    /// Reads a state of one copy of a parameter: the shards of all ranks of tensor parallelism.
    pub(super) fn read_copy(
        &self,
        dir: &MegatronDir,
        parameter: &Parameter,
        split: Split,
        shards: &[Shard],
        state: &str,
    ) -> Result<Vec<u8>, MegatronError> {
        let shape = parameter.inner();
        let mut whole = Vec::new();
        for (rank, shard) in shards.iter().enumerate() {
            let name = self.buckets[shard.bucket].tensor(state);
            let part = dir.dcp().read_region(&name, &[shard.start], &[shard.len])?;
            if shards.len() == 1 {
                return Ok(part);
            }
            if whole.is_empty() {
                whole = vec![0; part.len() * shards.len()];
            }
            split.copy_into(&mut whole, shape, &part, rank, shards.len());
        }
        Ok(whole)
    }
}
