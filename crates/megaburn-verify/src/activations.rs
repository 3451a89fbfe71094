//! Where a layout begins to differ: the output of each block and its gradient, compared with those
//! of one rank and, where the reference has them, with the hidden states of `transformers`.

use std::{collections::BTreeMap, fmt};

use burn::{
    prelude::Device,
    tensor::{DType, Tensor, TensorData},
};
use megaburn_collective::{Group, GroupOptions, ProcessGroups, RankEnv, objects};
use megaburn_mesh::Layout;
use megaburn_models::ModelError;
use megaburn_parallel::BlockValues;
use megaburn_train::{TrainError, config::Dtype, device::Devices, run_ranks};
use serde::{Deserialize, Serialize};

use crate::{
    rank::{VerifyRank, share},
    reference::Reference,
    report::Tolerances,
};

/// What each block of the full model computes on one rank.
type Blocks = BTreeMap<Option<usize>, BlockValues>;

/// How the blocks of a layout differ: a line of `megaburn verify --activations --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ActivationReport {
    /// `model_type` of `config.json`.
    pub family: String,
    /// Canonical text of the layout.
    pub layout: String,
    /// The embeddings and the blocks, in their order.
    pub blocks: Vec<BlockDifference>,
    /// The largest difference that counts as equal.
    pub tolerance: f64,
    /// Why there is no result.
    pub error: Option<String>,
}

/// How the residual stream after a block differs, as `|| a - b || / || b ||`; a number that is not
/// finite becomes null.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BlockDifference {
    /// `embedding`, or the number of the block.
    pub block: String,
    /// The output, compared with one rank's.
    pub output: f64,
    /// Its gradient, compared with one rank's.
    pub gradient: f64,
    /// The output, compared with the reference's; absent if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<f64>,
}

impl ActivationReport {
    fn new(reference: &Reference, layout: &str, tolerance: f64) -> Self {
        Self {
            family: reference.source.config().family.to_string(),
            layout: layout.to_string(),
            blocks: Vec::new(),
            tolerance,
            error: None,
        }
    }

    /// The report of a layout that was refused.
    pub fn refused(reference: &Reference, layout: &str, why: String) -> Self {
        Self {
            error: Some(why),
            ..Self::new(reference, layout, 0.0)
        }
    }

    /// The first block whose output differs from one rank's.
    pub fn first_output(&self) -> Option<&BlockDifference> {
        let mut blocks = self.blocks.iter();
        blocks.find(|block| self.differs(block.output))
    }

    /// The first block, in the order of the backward pass, whose gradient differs from one rank's.
    pub fn first_gradient(&self) -> Option<&BlockDifference> {
        let mut blocks = self.blocks.iter().rev();
        blocks.find(|block| self.differs(block.gradient))
    }

    /// The first block whose output differs from the reference's.
    pub fn first_reference(&self) -> Option<&BlockDifference> {
        let differs = |block: &&BlockDifference| {
            let found = block.reference;
            found.is_some_and(|found| self.differs(found))
        };
        self.blocks.iter().find(differs)
    }

    /// Whether every block was compared and none differs.
    pub fn is_ok(&self) -> bool {
        let first = [
            self.first_output(),
            self.first_gradient(),
            self.first_reference(),
        ];
        self.error.is_none() && !self.blocks.is_empty() && first.iter().all(Option::is_none)
    }

    /// NaN differs from everything.
    fn differs(&self, difference: f64) -> bool {
        difference.is_nan() || difference > self.tolerance
    }
}

impl fmt::Display for ActivationReport {
    /// A table with a row for each block, and what differs first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.is_ok() { "ok    " } else { "FAILED" };
        write!(f, "{verdict} {} {}", self.family, self.layout)?;
        if let Some(error) = &self.error {
            return write!(f, ": {error}");
        }
        write!(
            f,
            "\n{:<10}{:>10}{:>10}{:>14}",
            "block", "output", "gradient", "Transformers"
        )?;
        for block in &self.blocks {
            let reference = block.reference;
            let reference = reference.map_or("-".into(), |found| format!("{found:.1e}"));
            let BlockDifference {
                block,
                output,
                gradient,
                ..
            } = block;
            write!(
                f,
                "\n{block:<10}{output:>10.1e}{gradient:>10.1e}{reference:>14}"
            )?;
        }
        let first = [
            ("output differs first after", self.first_output()),
            ("gradient differs first after", self.first_gradient()),
            ("Transformers differs first after", self.first_reference()),
        ];
        for (what, block) in first {
            if let Some(BlockDifference { block, .. }) = block {
                let which = match block.as_str() {
                    "embedding" => "the embeddings".to_string(),
                    number => format!("block {number}"),
                };
                write!(f, "\n{what} {which}")?;
            }
        }
        Ok(())
    }
}

/// Compares each block of `layout` with one rank's, in the same type, as
/// [`verify`](crate::verify) runs them. Each process computes one rank's blocks itself, so it must
/// hold the full model.
///
/// # Errors
/// Never returned: a layout that the model refuses, or a failure, is in the report.
/// # Collective
/// All ranks.
pub fn verify_activations(
    reference: &Reference,
    layout: &Layout,
    dtype: Dtype,
    tolerances: &Tolerances,
    devices: Devices,
    env: Option<RankEnv>,
) -> ActivationReport {
    verify_activations_of(
        [reference, reference],
        layout,
        dtype,
        tolerances,
        devices,
        env,
    )
}

/// As [`verify_activations`], of two models on the same batch: one rank computes the first, and the
/// layout the second.
///
/// # Errors
/// As [`verify_activations`].
/// # Collective
/// All ranks.
pub fn verify_activations_of(
    [whole, split]: [&Reference; 2],
    layout: &Layout,
    dtype: Dtype,
    tolerances: &Tolerances,
    devices: Devices,
    env: Option<RankEnv>,
) -> ActivationReport {
    let text = layout.to_string();
    let run = || {
        if split.source.config().is_encoder_decoder() {
            return Err(TrainError::Invalid {
                key: "--activations",
                value: split.source.config().family.to_string(),
                rule: "used with a model that is a decoder or an encoder: blocks of an encoder \
                    and a decoder have streams of their own"
                    .into(),
            });
        }
        split.check(layout)?;
        let device = devices.of_this_process(layout, env.as_ref())?;
        let expected = on_one_rank(whole, dtype, &device)?;
        let compare = |world: &Group| compare(world, split, &expected, layout, dtype, &device);
        let options = GroupOptions::default();
        Ok(run_ranks(layout, env, options, &device, compare)?.swap_remove(0))
    };
    match run() {
        Ok(blocks) => ActivationReport {
            blocks,
            ..ActivationReport::new(split, &text, tolerances.grad)
        },
        Err(error) => ActivationReport::refused(split, &text, error.to_string()),
    }
}

/// What each block of the full model computes.
fn on_one_rank(reference: &Reference, dtype: Dtype, device: &Device) -> Result<Blocks, TrainError> {
    let groups = ProcessGroups::new(&Group::single(0), Layout::SINGLE)?;
    VerifyRank::new(reference, groups, dtype, &device.clone().autodiff())?.blocks()
}

/// Compares the blocks of this rank with its part of `expected`. Returns the differences over all
/// ranks on rank 0.
///
/// # Collective
/// All ranks.
fn compare(
    world: &Group,
    reference: &Reference,
    expected: &Blocks,
    layout: &Layout,
    dtype: Dtype,
    device: &Device,
) -> Result<Vec<BlockDifference>, TrainError> {
    let groups = ProcessGroups::new(world, *layout)?;
    let rank = VerifyRank::new(reference, groups.clone(), dtype, &device.clone().autodiff())?;
    let mut sums = Vec::new();
    for (block, BlockValues { output, gradient }) in rank.blocks()? {
        let Some(whole) = expected.get(&block) else {
            continue;
        };
        // One rank has `[S, B, H]`, a rank its part of `[B, S, H]`.
        let part = |whole: Tensor<3>| own_part(share(whole.swap_dims(0, 1), &groups), &groups);
        let gradients = gradient.zip(whole.gradient.clone());
        let hidden = hidden_state(reference, block, whole.output.dims())?;
        let hidden = hidden.map(|hidden| Tensor::from_data(hidden, &output.device()));
        sums.push(BlockSums {
            block,
            output: distance(output.clone(), part(whole.output.clone()))?,
            gradient: match gradients {
                Some((found, whole)) => distance(found, part(whole))?,
                None => [f64::NAN.to_bits(), 0],
            },
            reference: hidden
                .map(|hidden| distance(output, own_part(share(hidden, &groups), &groups)))
                .transpose()?,
        });
    }
    let all = objects::gather(world, &sums)?;
    Ok(total(all.into_iter().flatten()))
}

/// The output of a block, or of the embeddings (`None`), in the reference, `[B, S, H]`, if it is
/// there. `dims` is `[S, B, H]`.
fn hidden_state(
    reference: &Reference,
    block: Option<usize>,
    [seq_len, batch, hidden]: [usize; 3],
) -> Result<Option<TensorData>, TrainError> {
    let name = match block {
        Some(number) => format!("hidden.{number}"),
        None => "hidden.embedding".to_string(),
    };
    let Some(found) = reference.tensors.shape(&name) else {
        return Ok(None);
    };
    let expected = [batch, seq_len, hidden];
    if found != expected {
        return Err(ModelError::Tensor {
            path: reference.tensors.path().to_path_buf(),
            name,
            why: format!("expected {expected:?}, found {found:?}"),
        }
        .into());
    }
    Ok(Some(reference.tensors.read(&name)?.convert::<f32>()))
}

/// This rank's part of a sequence that sequence parallelism splits.
fn own_part(x: Tensor<3>, groups: &ProcessGroups) -> Tensor<3> {
    if !groups.layout().sp {
        return x;
    }
    let len = x.dims()[0] / groups.tp.size();
    x.narrow(0, groups.tp.rank() * len, len)
}

/// Sums of squares of one rank: of the differences, and of what is expected. They are bits of f64,
/// because JSON has no NaN.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct BlockSums {
    block: Option<usize>,
    output: [u64; 2],
    gradient: [u64; 2],
    reference: Option<[u64; 2]>,
}

/// `|| found - expected ||^2` and `|| expected ||^2`, as bits.
fn distance(found: Tensor<3>, expected: Tensor<3>) -> Result<[u64; 2], TrainError> {
    let [found, expected] = [found, expected].map(|x| x.cast(DType::F32).into_data());
    let mut sums = [0.0f64; 2];
    for (found, expected) in found.iter::<f64>().zip(expected.iter::<f64>()) {
        sums[0] += (found - expected).powi(2);
        sums[1] += expected.powi(2);
    }
    Ok(sums.map(f64::to_bits))
}

/// The relative differences over all ranks, in the order of the blocks.
fn total(ranks: impl Iterator<Item = BlockSums>) -> Vec<BlockDifference> {
    let mut found: BTreeMap<Option<usize>, [Option<[f64; 2]>; 3]> = BTreeMap::new();
    for sums in ranks {
        let all = found.entry(sums.block).or_default();
        let of_rank = [Some(sums.output), Some(sums.gradient), sums.reference];
        for (all, own) in all.iter_mut().zip(of_rank) {
            if let Some(own) = own {
                let all = all.get_or_insert([0.0; 2]);
                all.iter_mut()
                    .zip(own)
                    .for_each(|(all, own)| *all += f64::from_bits(own));
            }
        }
    }
    let relative = |[distance, norm]: [f64; 2]| match distance {
        // Two zeros do not differ.
        0.0 => 0.0,
        distance => (distance / norm).sqrt(),
    };
    let difference = |(block, sums): (Option<usize>, [Option<[f64; 2]>; 3])| {
        let [output, gradient, reference] = sums.map(|sums| sums.map(relative));
        BlockDifference {
            block: block.map_or("embedding".into(), |number| number.to_string()),
            output: output.unwrap_or(f64::NAN),
            gradient: gradient.unwrap_or(f64::NAN),
            reference,
        }
    };
    found.into_iter().map(difference).collect()
}
