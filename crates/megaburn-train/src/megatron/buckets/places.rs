use std::{ops::Range, path::Path};

use megaburn_models::DecoderConfig;
use megaburn_torch::megatron::OptimizerBucket;

use super::{
    order::{Order, Part},
    ranks::Ranks,
    refused::refused,
    split::Split,
};
use crate::megatron::{error::MegatronError, parameter::Parameter};

/// The multiple of elements at which a parameter of a bucket begins.
///
/// Source: Megatron-Core, `_ParamAndGradBuffer`.
const START: usize = 64;

/// Where the part of a parameter is that one rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shard {
    /// The bucket, an index of those of the checkpoint.
    pub(super) bucket: usize,
    /// The first element.
    pub(super) start: usize,
    /// The number of elements.
    pub(super) len: usize,
}

/// Where a parameter is.
#[derive(Clone, Debug)]
pub(super) struct Places {
    pub(super) split: Split,
    /// The copies of the parameter: the shards of each, in the order of the ranks that divide it.
    pub(super) copies: Vec<Vec<Shard>>,
}

/// The places of all parameters, for one order of them.
///
/// A bucket of a stage has its parameters in reverse order. How many layers a stage has follows from
/// the length of its buckets, and so does where a bucket ends.
///
/// # Errors
/// The parameters do not fill the buckets.
pub(super) fn places(
    path: &Path,
    order: Order,
    ranks: &Ranks,
    model: &DecoderConfig,
    parameters: &[Parameter],
    buckets: &[OptimizerBucket],
) -> Result<Vec<Places>, MegatronError> {
    let is_gated = model.activation.is_gated();
    let mut sorted = Vec::new();
    let mut found = Vec::new();
    for (index, parameter) in parameters.iter().enumerate() {
        let (part, key) = order.key(&parameter.place).ok_or_else(|| {
            let why = format!("have no known place for `{}`", parameter.theirs);
            refused(path, why)
        })?;
        sorted.push((part, key, index));
        found.push(Places {
            split: Split::of(&parameter.place, is_gated),
            copies: Vec::new(),
        });
    }
    sorted.sort_unstable();
    let stages = Stages {
        path,
        ranks,
        model,
        parameters,
        buckets,
        sorted,
    };
    stages.fill(&mut found)?;
    Ok(found)
}

/// What the stages of a pipeline are filled from.
struct Stages<'a> {
    path: &'a Path,
    ranks: &'a Ranks,
    model: &'a DecoderConfig,
    parameters: &'a [Parameter],
    buckets: &'a [OptimizerBucket],
    /// The parameters in the order of the model.
    sorted: Vec<(Part, [usize; 3], usize)>,
}

impl Stages<'_> {
    /// Fills the stages one after the other.
    fn fill(&self, places: &mut [Places]) -> Result<(), MegatronError> {
        let (last, layers) = (self.ranks.num_stages() - 1, self.model.layers);
        let mut first = 0;
        for stage in 0..=last {
            let rest = layers - first;
            // The lengths of different numbers of layers differ, so one number fits.
            let mut counts = if stage == last { rest..=rest } else { 0..=rest };
            let fitting = counts.find_map(|count| {
                let stage_parameters = self.parameters_of(stage, first..first + count);
                let lens = self.lens(&stage_parameters.dense, places, self.ranks.tp)?;
                let filled = fill(&lens, self.buckets, self.ranks.dense(stage, 0));
                filled.map(|_| (count, stage_parameters))
            });
            let Some((count, of_stage)) = fitting else {
                let why = format!(
                    "do not fit: those of stage {stage} of the pipeline are not filled by the \
                    parameters of layers from {first} on"
                );
                return Err(refused(self.path, why));
            };
            for tp in 0..self.ranks.tp {
                let into = self.ranks.dense(stage, tp);
                self.place(&of_stage.dense, into, self.ranks.tp, tp, places, stage)?;
            }
            for ep in 0..self.ranks.ep {
                for etp in 0..self.ranks.etp {
                    let into = self.ranks.experts(stage, ep, etp);
                    let of_rank = &of_stage.experts[ep];
                    self.place(of_rank, into, self.ranks.etp, etp, places, stage)?;
                }
            }
            first += count;
        }
        Ok(())
    }

    /// The parameters of a stage that has these layers.
    fn parameters_of(&self, stage: usize, layers: Range<usize>) -> StageParameters {
        let last = self.ranks.num_stages() - 1;
        let mut found = StageParameters {
            dense: Vec::new(),
            experts: vec![Vec::new(); self.ranks.ep],
        };
        let num_experts = self.model.experts.as_ref().map_or(1, |experts| experts.num);
        for (part, _, index) in &self.sorted {
            let is_here = match part {
                Part::Before => stage == 0,
                Part::Layer(layer) => layers.contains(layer),
                Part::After => stage == last,
            };
            if !is_here {
                continue;
            }
            match self.parameters[*index].place.expert {
                Some(expert) if self.ranks.ep > 1 => {
                    // If the ranks do not divide the experts, their buckets are not filled.
                    let of_rank = num_experts.div_ceil(self.ranks.ep);
                    found.experts[expert / of_rank].push(*index);
                }
                _ => found.dense.push(*index),
            }
        }
        if self.model.tied && stage == last && last > 0 {
            // The last stage has a copy of the embedding, which is its output matrix.
            let embedding = self.sorted.iter().find(|(part, ..)| *part == Part::Before);
            found.dense.extend(embedding.map(|(.., index)| *index));
        }
        found
    }

    /// The lengths of the parts that a rank has of parameters; `None` if one is not divided.
    fn lens(&self, of: &[usize], places: &[Places], ranks: usize) -> Option<Vec<usize>> {
        let len = |index: &usize| {
            places[*index]
                .split
                .len(self.parameters[*index].inner(), ranks)
        };
        of.iter().map(len).collect()
    }

    /// Places the parameters of one rank.
    fn place(
        &self,
        of: &[usize],
        into: &[usize],
        ranks: usize,
        rank: usize,
        places: &mut [Places],
        stage: usize,
    ) -> Result<(), MegatronError> {
        let lens = self.lens(of, places, ranks);
        let shards = lens.and_then(|lens| fill(&lens, self.buckets, into));
        let shards = shards.ok_or_else(|| {
            let why = format!(
                "do not fit: those of rank {rank} of {ranks} in stage {stage} of the pipeline are \
                not filled by its parameters"
            );
            refused(self.path, why)
        })?;
        for (index, shard) in of.iter().zip(shards) {
            let Places { split, copies } = &mut places[*index];
            match copies.last_mut() {
                Some(copy) if rank > 0 && *split != Split::Copies => copy.push(shard),
                _ => copies.push(vec![shard]),
            }
        }
        Ok(())
    }
}

/// The parameters of a stage in the order of the model, as indices.
struct StageParameters {
    dense: Vec<usize>,
    /// Those of each rank of expert parallelism, if experts have buckets of their own.
    experts: Vec<Vec<usize>>,
}

/// Places parameters of these lengths, in the order of the model, into buckets; `None` if they do
/// not fill them. `into` are indices of `all`.
fn fill(lens: &[usize], all: &[OptimizerBucket], into: &[usize]) -> Option<Vec<Shard>> {
    // A bucket ends with its last parameter, or, before a tied embedding, where the next one would
    // begin.
    let is_full = |end: usize, len: usize| end == len || end.next_multiple_of(START) == len;
    let mut shards = Vec::with_capacity(lens.len());
    let mut rest = into.iter();
    let (mut bucket, mut end) = (None, 0usize);
    for len in lens.iter().rev() {
        let mut start = end.next_multiple_of(START);
        let has_room = bucket.is_some_and(|index: usize| start + len <= all[index].len);
        if !has_room {
            if bucket.is_some_and(|index| !is_full(end, all[index].len)) {
                return None;
            }
            let next = *rest.next()?;
            if *len > all[next].len {
                return None;
            }
            (bucket, start) = (Some(next), 0);
        }
        end = start + len;
        shards.push(Shard {
            bucket: bucket?,
            start,
            len: *len,
        });
    }
    let is_filled = bucket.is_none_or(|index| is_full(end, all[index].len));
    (is_filled && rest.next().is_none()).then(|| shards.into_iter().rev().collect())
}
