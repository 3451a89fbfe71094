use std::collections::BTreeMap;

use burn::module::Module;
use megaburn_collective::objects;
use megaburn_mesh::ShardSpec;
use megaburn_parallel::lazy_params;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3Default;

use crate::{
    error::TrainError,
    trainer_core::{TrainerCore, first_times::Work, held_tensors::to_host},
};

/// A range of a parameter that a rank holds, and the hash of its values.
#[derive(Debug, Serialize, Deserialize)]
struct ParamHash {
    param: String,
    start: usize,
    end: usize,
    hash: u64,
}

/// A parameter of which two ranks hold different copies.
#[derive(Debug, Serialize, Deserialize)]
struct Difference {
    param: String,
    ranks: [usize; 2],
}

impl<M: Module> TrainerCore<M> {
    /// Compares the copies of parameters that several ranks hold; see
    /// [`Trainer::check_replicas`](crate::Trainer::check_replicas).
    ///
    /// # Errors
    /// Two ranks differ (the error names the parameter), or a device cannot be read.
    /// # Collective
    /// All ranks; a hash of each range of each parameter goes to rank 0.
    pub(crate) fn check_replicas(&self) -> Result<(), TrainError> {
        let _compiling = self.first_times.begin(Work::Replicas, &self.groups.world);
        let mut mine = Vec::new();
        let params = lazy_params(self.model()).into_iter();
        for param in params.filter(|param| !self.sharding.is_param_sharded(&param.path)) {
            let path = param.path.clone();
            // Shards of masters have no copies.
            let is_whole = self.sharding.num_shares(&path) == 1;
            let value = param.flat();
            let master = || self.optimizer.master(&path, || value.clone());
            let master = is_whole.then(master).flatten();
            let data = to_host(master.unwrap_or(value));
            let data = data.map_err(|why| TrainError::Device { why })?;
            let shard = &self.plan.get(&path).expect("the plan was validated").shard;
            mine.extend(held(&path, shard, data.as_bytes()));
        }
        let world = &self.groups.world;
        let first = first_difference(objects::gather(world, &mine)?);
        match objects::broadcast(world, &first)? {
            Some(Difference { param, ranks }) => {
                let step = self.progress.step;
                Err(TrainError::ReplicasDiffer { step, param, ranks })
            }
            None => Ok(()),
        }
    }
}

fn held(path: &str, shard: &ShardSpec, bytes: &[u8]) -> Vec<ParamHash> {
    let elements: usize = shard.local_shape().iter().product();
    let size = bytes.len() / elements.max(1);
    let piece = |piece: &megaburn_mesh::ShardPiece| {
        let mut hash = Xxh3Default::new();
        shard.for_each_run(piece, |local, _, len| {
            hash.update(&bytes[local * size..(local + len) * size]);
        });
        let start = piece.global.start;
        let end = piece.global.end;
        ParamHash {
            param: path.to_string(),
            start,
            end,
            hash: hash.digest(),
        }
    };
    shard.pieces.iter().map(piece).collect()
}

/// The first range, in the model's order, in which a rank differs from the lowest rank that holds
/// it.
fn first_difference(all: Vec<Vec<ParamHash>>) -> Option<Difference> {
    let mut first = BTreeMap::new();
    let mut found = None;
    for (rank, held) in all.into_iter().enumerate() {
        for (
            place,
            ParamHash {
                param,
                start,
                end,
                hash,
            },
        ) in held.into_iter().enumerate()
        {
            let (other, expected) = *first
                .entry((param.clone(), start, end))
                .or_insert((rank, hash));
            let is_first = found.as_ref().is_none_or(|(at, _)| place < *at);
            if hash != expected && is_first {
                found = Some((
                    place,
                    Difference {
                        param,
                        ranks: [other, rank],
                    },
                ));
            }
        }
    }
    found.map(|(_, difference)| difference)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::trainer::testing::{poison, trainers};

    #[rstest]
    // Data-parallel copies; a norm, which tensor-parallel ranks hold too; keys and values, with
    // fewer heads than ranks.
    #[case("dp3", 2, "blocks.1.mlp.down.weight", [0, 2])]
    #[case("tp2-dp2", 3, "blocks.1.attention.output.weight", [1, 3])]
    #[case("tp2", 1, "blocks.0.mlp_norm.gamma", [0, 1])]
    #[case("tp4", 3, "blocks.1.attention.qkv.weight", [2, 3])]
    #[case("pp2-dp2", 3, "blocks.1.mlp.down.weight", [2, 3])]
    #[case("cp2", 1, "blocks.0.mlp_norm.gamma", [0, 1])]
    // The matrix with which the model begins and ends.
    #[case("pp2-dp2", 2, "embedding.weight", [0, 2])]
    fn a_copy_that_differs_is_found(
        #[case] layout: &str,
        #[case] rank: usize,
        #[case] param: &str,
        #[case] ranks: [usize; 2],
        #[values("parallel.zero=0", "parallel.zero=1")] zero: &str,
    ) {
        // The poisoned element is the last one, so it must not be padding.
        let errors = trainers(&[zero, "model.vocab=384"], layout, |mut trainer| {
            trainer.step()?;
            trainer.check_replicas()?;
            if trainer.core.groups.world.rank() == rank {
                poison(&mut trainer, param, 0.5);
            }
            Ok(trainer.check_replicas().unwrap_err().to_string())
        });
        let [a, b] = ranks;
        let text = format!("after step 1 ranks {a} and {b} have different copies of `{param}`");
        for error in errors {
            assert!(error.starts_with(&text), "{error}");
        }
    }
    #[rstest]
    fn shares_of_masters_are_no_copies(
        #[values("dp2", "tp2-dp3")] layout: &str,
        #[values(
            "parallel.zero=0",
            "parallel.zero=1",
            "parallel.zero=2",
            "parallel.zero=3"
        )]
        zero: &str,
    ) {
        trainers(&[zero, "train.dtype=bf16"], layout, |mut trainer| {
            trainer.step()?;
            trainer.check_replicas()
        });
    }
}
