use std::collections::{BTreeMap, BTreeSet};

use megaburn_models::DecoderConfig;
use megaburn_torch::megatron::OptimizerBucket;

use super::refused::refused;
use crate::megatron::{args::Args, error::MegatronError};

/// The ranks of model parallelism whose buckets a checkpoint has.
#[derive(Debug)]
pub(super) struct Ranks {
    /// Ranks of tensor parallelism.
    pub(super) tp: usize,
    /// Ranks of tensor parallelism inside of an expert.
    pub(super) etp: usize,
    /// Ranks of expert parallelism.
    pub(super) ep: usize,
    /// Ranks of pipeline parallelism.
    pub(super) pp: usize,
    /// Chunks of the model that a rank of pipeline parallelism has.
    pub(super) chunks: usize,
    /// The buckets of each chunk, by group and chunk.
    dense: BTreeMap<(usize, usize), Vec<usize>>,
    /// The same of experts, if they have buckets of their own.
    experts: BTreeMap<(usize, usize), Vec<usize>>,
}

impl Ranks {
    /// Counts the ranks, by the arguments of the run and its buckets.
    ///
    /// A group of buckets is a rank of model parallelism: tensor parallelism changes fastest, then
    /// expert parallelism for the buckets of experts, then pipeline parallelism.
    ///
    /// Source: Megatron-Core, `get_megatron_optimizer`, `initialize_model_parallel`.
    ///
    /// # Errors
    /// The checkpoint has other groups of buckets than the arguments say, or weights of several
    /// types.
    pub(super) fn of(
        args: Args,
        model: &DecoderConfig,
        buckets: &[OptimizerBucket],
    ) -> Result<Self, MegatronError> {
        let degree = |name| Ok::<_, MegatronError>(args.optional_size(name)?.unwrap_or(1).max(1));
        let tp = degree("tensor_model_parallel_size")?;
        let pp = degree("pipeline_model_parallel_size")?;
        let (mut ep, mut etp) = (1, tp);
        if model.experts.is_some() {
            ep = degree("expert_model_parallel_size")?;
            etp = args
                .optional_size("expert_tensor_parallel_size")?
                .unwrap_or(tp)
                .max(1);
        }
        let name = "expert_tensor_parallel_size";
        if ep == 1 && etp != tp {
            let why = "experts without expert parallelism are divided like other layers, as is \
                converted from buckets, if it is the degree of tensor parallelism";
            return Err(args.refused(name, why));
        }
        let types: BTreeSet<&str> = buckets.iter().map(|bucket| bucket.dtype.name()).collect();
        if types.len() > 1 {
            let why = format!("have weights of several types ({types:?}), which is not converted");
            return Err(refused(args.path(), why));
        }
        // The optimizer of experts is the last one. Others divide the chunks of a model in order.
        let last = buckets.iter().map(|bucket| bucket.optimizer).max();
        let of_experts = last.filter(|_| ep > 1);
        let (mut dense, mut experts) = (BTreeMap::new(), BTreeMap::new());
        for (index, bucket) in buckets.iter().enumerate() {
            let chunks = match of_experts == Some(bucket.optimizer) {
                true => &mut experts,
                false => &mut dense,
            };
            let chunk = (bucket.group, bucket.optimizer, bucket.buffer);
            chunks.entry(chunk).or_insert_with(Vec::new).push(index);
        }
        let (dense, experts) = (numbered(dense), numbered(experts));
        let chunks = dense.keys().map(|(_, chunk)| chunk + 1).max().unwrap_or(0);
        if chunks == 0 {
            return Err(refused(args.path(), "have no parameters of layers"));
        }
        let ranks = Self {
            tp,
            etp,
            ep,
            pp,
            chunks,
            dense,
            experts,
        };
        ranks.check(args, "layers", &ranks.dense, &[tp, pp])?;
        if ep > 1 {
            ranks.check(args, "experts", &ranks.experts, &[etp, ep, pp])?;
        }
        Ok(ranks)
    }

    /// Refuses other groups of buckets than the ranks of these degrees.
    fn check(
        &self,
        args: Args,
        what: &str,
        found: &BTreeMap<(usize, usize), Vec<usize>>,
        degrees: &[usize],
    ) -> Result<(), MegatronError> {
        let groups: Option<usize> = degrees
            .iter()
            .try_fold(self.chunks, |product, degree| product.checked_mul(*degree));
        let is_known = |group: usize| group < found.len();
        if groups == Some(found.len()) && found.keys().all(|(group, _)| is_known(*group)) {
            return Ok(());
        }
        let why = format!(
            "are those of {} parts of {what}, but the arguments say {degrees:?} ranks of model \
            parallelism with {} chunks each",
            found.len(),
            self.chunks
        );
        Err(refused(args.path(), why))
    }

    /// The number of stages of the whole pipeline.
    pub(super) fn num_stages(&self) -> usize {
        self.pp * self.chunks
    }

    /// The buckets of a rank of tensor parallelism in a stage of the pipeline. The stages go through
    /// the first chunks of all ranks, then the second ones.
    pub(super) fn dense(&self, stage: usize, tp: usize) -> &[usize] {
        let group = stage % self.pp * self.tp + tp;
        self.dense
            .get(&(group, stage / self.pp))
            .map_or(&[], Vec::as_slice)
    }

    /// The buckets of experts of a rank in a stage of the pipeline.
    pub(super) fn experts(&self, stage: usize, ep: usize, etp: usize) -> &[usize] {
        let group = (stage % self.pp * self.ep + ep) * self.etp + etp;
        self.experts
            .get(&(group, stage / self.pp))
            .map_or(&[], Vec::as_slice)
    }
}

/// Numbers the buffers of each group from 0, whatever their optimizer is.
fn numbered(
    buffers: BTreeMap<(usize, usize, usize), Vec<usize>>,
) -> BTreeMap<(usize, usize), Vec<usize>> {
    let mut chunks = BTreeMap::new();
    let mut next: BTreeMap<usize, usize> = BTreeMap::new();
    for ((group, ..), buckets) in buffers {
        let number = next.entry(group).or_default();
        chunks.insert((group, *number), buckets);
        *number += 1;
    }
    chunks
}
