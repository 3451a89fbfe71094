use std::collections::BTreeMap;

use crate::dcp::DcpDir;
use crate::dtype::DType;
use crate::error::TorchError;
use crate::megatron::optimizer::without_chain;

/// The states that a bucket of AdamW has: the f32 weights and both moments.
const STATES: [&str; 3] = ["param", "exp_avg", "exp_avg_sq"];

/// A bucket of the distributed optimizer: the parameters of a rank of model parallelism, one after
/// the other, in the order in which their gradients become complete.
///
/// Each parameter begins at a multiple of 64 elements, and what is between two of them has no
/// meaning. The ranks of data parallelism share a bucket, which is one tensor for each state.
///
/// Source: Megatron-Core, `_ParamAndGradBuffer` and
/// `DistributedOptimizer.sharded_param_state_dp_reshardable`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OptimizerBucket {
    /// The number of the optimizer in a chain of several, or 0.
    pub optimizer: usize,
    /// The rank of model parallelism: the index of the group of data parallelism.
    pub group: usize,
    /// The number of the buffer of the rank. Each chunk of the model has one for each type.
    pub buffer: usize,
    /// The number of the bucket in its buffer.
    pub index: usize,
    /// The type of the model's weights.
    pub dtype: DType,
    /// Elements of each state, from the first parameter to the end of the last one.
    pub len: usize,
    key: String,
}

impl OptimizerBucket {
    /// The name of the tensor that has a state: `param`, which are the f32 weights, `exp_avg` or
    /// `exp_avg_sq`. All of them are in f32, and have one dim.
    pub fn tensor(&self, state: &str) -> String {
        format!("{}.{state}", self.key)
    }

    /// Reads the name of a tensor: the bucket without its length, and the state.
    fn parse(name: &str) -> Option<(Self, &str)> {
        let bare = without_chain(name);
        let chain = &name[..name.len() - bare.len()];
        let optimizer = chain
            .trim_end_matches('.')
            .strip_prefix("chained_")
            .map_or(Some(0), |number| number.parse().ok())?;
        let rest = bare.strip_prefix("optimizer.distributed.dp_group_idx_")?;
        let (group, rest) = rest.split_once(".gbuf_idx_")?;
        let (buffer, rest) = rest.split_once(".dtype_(torch.")?;
        let (dtypes, rest) = rest.split_once(").bucket_idx_")?;
        let (index, state) = rest.split_once('.')?;
        let (weights, _) = dtypes.split_once(", torch.")?;
        let bucket = Self {
            optimizer,
            group: group.parse().ok()?,
            buffer: buffer.parse().ok()?,
            index: index.parse().ok()?,
            dtype: DType::from_name(weights)?,
            len: 0,
            key: name[..name.len() - state.len() - 1].into(),
        };
        Some((bucket, state))
    }

    /// What orders the buckets of a checkpoint.
    fn place(&self) -> (usize, usize, usize, usize) {
        (self.optimizer, self.group, self.buffer, self.index)
    }
}

/// The buckets of a checkpoint, by optimizer, rank, buffer and number.
pub(super) fn buckets(dcp: &DcpDir) -> Result<Vec<OptimizerBucket>, TorchError> {
    let error = |why: String| TorchError::OtherKind {
        path: dcp.path().into(),
        why: format!(
            "{why}; save it from Megatron-LM with --dist-ckpt-optim-fully-reshardable, or import \
                it with --weights-only"
        ),
    };
    let mut found = BTreeMap::new();
    for (name, tensor) in dcp.tensors() {
        if !without_chain(name).starts_with("optimizer.distributed.") {
            continue;
        }
        let parsed = OptimizerBucket::parse(name);
        let Some((bucket, _)) = parsed.filter(|(_, state)| STATES.contains(state)) else {
            let why = format!("`{name}` is no state of a bucket of AdamW whose weights are floats");
            return Err(error(why));
        };
        let &[len] = tensor.shape() else {
            let why = format!("`{name}` has the shape {:?}, not one dim", tensor.shape());
            return Err(error(why));
        };
        if tensor.dtype() != DType::F32 {
            return Err(error(format!("`{name}` is {}, not f32", tensor.dtype())));
        }
        let (known, num_states) = found.entry(bucket.place()).or_insert_with(|| {
            (
                OptimizerBucket {
                    len,
                    ..bucket.clone()
                },
                0,
            )
        });
        if (known.len, &known.key) != (len, &bucket.key) {
            let why = format!(
                "`{name}` has {len} elements, and another state of the bucket, `{}`, has {}",
                known.key, known.len
            );
            return Err(error(why));
        }
        *num_states += 1;
    }
    let mut before: Option<&OptimizerBucket> = None;
    for (bucket, num_states) in found.values() {
        if *num_states != STATES.len() {
            let why = format!("the bucket `{}` lacks one of {STATES:?}", bucket.key);
            return Err(error(why));
        }
        let is_next = |before: &OptimizerBucket| {
            before.index + 1 == bucket.index
                && OptimizerBucket {
                    index: bucket.index,
                    ..before.clone()
                }
                .place()
                    == bucket.place()
        };
        if bucket.index > 0 && !before.is_some_and(is_next) {
            return Err(error(format!(
                "the bucket before `{}` is missing",
                bucket.key
            )));
        }
        before = Some(bucket);
    }
    Ok(found.into_values().map(|(bucket, _)| bucket).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_buckets_are_read_and_written() {
        let inner = "optimizer.distributed.dp_group_idx_3.gbuf_idx_1.dtype_(torch.bfloat16, \
            torch.float32).bucket_idx_12";
        for (prefix, optimizer) in [("", 0), ("chained_0.", 0), ("chained_10.", 10)] {
            let name = format!("{prefix}{inner}.exp_avg_sq");
            let (bucket, state) = OptimizerBucket::parse(&name).unwrap();
            assert_eq!(state, "exp_avg_sq");
            assert_eq!(bucket.place(), (optimizer, 3, 1, 12));
            assert_eq!(bucket.dtype, DType::BF16);
            assert_eq!(bucket.tensor("exp_avg_sq"), name);
        }
        for name in [
            "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight",
            "optimizer.distributed.dp_group_idx_0.optimizer",
            inner,
            &format!("{}.param", inner.replace("gbuf_idx_1", "gbuf_idx_x")),
            &format!("{}.param", inner.replace("torch.bfloat16", "torch.bits")),
        ] {
            assert_eq!(OptimizerBucket::parse(name), None, "{name}");
        }
    }
}
