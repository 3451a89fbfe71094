//! The parameters of the ranks of a pipeline, put together from those of blocks.

use std::collections::{HashMap, hash_map::Entry};

use burn::prelude::Device;
use megaburn_collective::{Group, ProcessGroups};
use megaburn_mesh::Layout;
use megaburn_models::{DecoderConfig, ModelError, decoder::ModelOptions};
use megaburn_parallel::{main_grads, shard_plan};
use megaburn_pipeline::StageLayers;

use super::state::{Param, RankParams};
use crate::{config::TrainConfig, error::TrainError};

/// The parameters of the parts of one model, from which those of the rank of any pipeline stage are
/// put together. Parts that are alike are built once for each way to split them: blocks of experts
/// for each tp, ep and etp, the others for each tp.
#[derive(Clone, Debug, Default)]
pub struct PartParams {
    known: HashMap<(Layout, Part), RankParams>,
}

/// A part of a model that a rank holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Part {
    /// A block: the first one of its kind.
    Block(usize),
    /// What stands before the first block, after the last one, or both.
    Ends {
        embedding: bool,
        loss: bool,
        /// Whether another stage may use the same parameters.
        is_shared: bool,
    },
    /// All chunks of a rank, of a model whose blocks share parameters.
    Rank {
        chunks: Vec<(bool, Vec<usize>, bool)>,
        is_shared: bool,
    },
}

impl RankParams {
    /// The parameters of the rank of each pipeline stage, in rank order. Their sizes are taken from
    /// a model that is built without initializing its weights.
    ///
    /// # Errors
    /// The layout does not split the model.
    pub fn of_stages(
        config: &TrainConfig,
        layout: &Layout,
        model: &DecoderConfig,
    ) -> Result<Vec<Self>, TrainError> {
        PartParams::default().of_stages(config, layout, model)
    }
}

impl PartParams {
    /// As [`RankParams::of_stages`], with what is known from other layouts. The model and, except
    /// for `[parallel]`, the configuration must be those of the other layouts.
    ///
    /// # Errors
    /// As [`RankParams::of_stages`].
    pub fn of_stages(
        &mut self,
        config: &TrainConfig,
        layout: &Layout,
        model: &DecoderConfig,
    ) -> Result<Vec<RankParams>, TrainError> {
        let stages = config.parallel.stages(layout, model.layers)?;
        let mut split = Split {
            known: &mut self.known,
            model,
            alike: model.alike_blocks(),
            grid: grid(layout),
            is_shared: layout.pp > 1,
        };
        // Blocks that add the same relative bias share its table.
        let has_own = !model.is_encoder_decoder() && model.positions.relative().is_none();
        let of_rank = |chunks: &Vec<StageLayers>| match has_own {
            true => split.by_part(chunks),
            false => split.as_a_whole(chunks),
        };
        stages.iter().map(of_rank).collect()
    }

    /// The number of parts that were built.
    pub fn num_built(&self) -> usize {
        self.known.len()
    }
}

/// A model that a layout splits.
struct Split<'a> {
    known: &'a mut HashMap<(Layout, Part), RankParams>,
    model: &'a DecoderConfig,
    /// For each block, the first one like it.
    alike: Vec<usize>,
    grid: Layout,
    /// Whether there are other stages.
    is_shared: bool,
}

impl Split<'_> {
    /// The parameters of a rank with these chunks, from those of its parts.
    fn by_part(&mut self, chunks: &[StageLayers]) -> Result<RankParams, TrainError> {
        let mut all = RankParams::default();
        let embedding = chunks.iter().any(|chunk| chunk.embedding);
        let loss = chunks.iter().any(|chunk| chunk.loss);
        if embedding || loss {
            let part = Part::Ends {
                embedding,
                loss,
                is_shared: self.is_shared,
            };
            let chunk = StageLayers {
                embedding,
                layers: 0..0,
                loss,
            };
            let has_experts = loss && self.model.mtp_layers > 0;
            all.add(self.part(part, &[chunk], has_experts)?, 1);
        }
        let mut counts: Vec<(usize, usize)> = Vec::new();
        for chunk in chunks {
            for block in &self.alike[chunk.layers.clone()] {
                match counts.iter_mut().find(|(known, _)| known == block) {
                    Some((_, count)) => *count += 1,
                    None => counts.push((*block, 1)),
                }
            }
        }
        for (block, count) in counts {
            let chunk = StageLayers {
                embedding: false,
                layers: block..block + 1,
                loss: false,
            };
            let has_experts = self.model.layer_experts(block).is_some();
            all.add(self.part(Part::Block(block), &[chunk], has_experts)?, count);
        }
        Ok(all)
    }

    /// The parameters of a rank whose chunks are built together.
    fn as_a_whole(&mut self, chunks: &[StageLayers]) -> Result<RankParams, TrainError> {
        let blocks = |chunk: &StageLayers| {
            let blocks = self.alike[chunk.layers.clone()].to_vec();
            (chunk.embedding, blocks, chunk.loss)
        };
        let part = Part::Rank {
            chunks: chunks.iter().map(blocks).collect(),
            is_shared: self.is_shared,
        };
        self.part(part, chunks, true).cloned()
    }

    /// The parameters of a part, which consists of these chunks.
    fn part(
        &mut self,
        part: Part,
        chunks: &[StageLayers],
        has_experts: bool,
    ) -> Result<&RankParams, TrainError> {
        // ep and etp split nothing else.
        let grid = match has_experts {
            true => self.grid,
            false => Layout {
                dp: 1,
                ep: 1,
                etp: 1,
                ..self.grid
            },
        };
        Ok(match self.known.entry((grid, part)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                unknown.insert(built(chunks, grid, self.model, self.is_shared)?)
            }
        })
    }
}

/// The smallest world whose first rank holds as large a part of each matrix as one of `layout`.
fn grid(layout: &Layout) -> Layout {
    let split = layout.ep * layout.etp;
    let dp = (1..=split)
        .find(|dp| (layout.tp * dp).is_multiple_of(split))
        .unwrap_or(split);
    Layout {
        cp: 1,
        pp: 1,
        dp,
        ..*layout
    }
}

/// The parameters of the first rank of `grid` with these chunks, some of which other stages use too
/// if `is_shared`.
fn built(
    chunks: &[StageLayers],
    grid: Layout,
    model: &DecoderConfig,
    is_shared: bool,
) -> Result<RankParams, TrainError> {
    let world = Group::of_shapes(0, grid.world_size());
    let groups = ProcessGroups::new(&world, grid)?;
    let options = ModelOptions {
        sequence_parallel: grid.sp,
        ..ModelOptions::default()
    };
    let built = model.init_stages(chunks, &groups, &options, &Device::flex())?;
    let direct = main_grads(&built);
    let shared = |path: &str| {
        let of = |stage| model.shared_params(stage).contains(&path);
        is_shared && chunks.iter().any(of)
    };
    let plan = shard_plan(&built).map_err(ModelError::from)?;
    let mut all = RankParams::default();
    for (path, spec) in plan.iter() {
        let is_direct = direct.contains_key(path) && !shared(path);
        all.add_param(Param::new(path, spec, is_direct), 1);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::config::ConfigLayers;

    /// What a rank holds is the sum of its parts.
    #[rstest]
    #[case("tp1", &[])]
    #[case("tp2-pp2-sp", &[])]
    #[case("pp2", &["model.tied=false", "parallel.schedule=zb-v"])]
    #[case("pp2-dp2", &["model.family=gpt2"])]
    #[case("tp2-dp2-ep4-sp", &["model.family=mixtral", "model.experts.num=4"])]
    #[case("tp2-dp2-ep2-etp2-sp", &["model.family=mixtral", "model.experts.num=4"])]
    #[case("pp4-dp2-ep2", &[
        "model.family=mixtral",
        "model.experts.num=4",
        "model.experts.layer_freq=([0]*1+[1]*7)",
        "model.mtp_layers=1",
    ])]
    fn parts_make_up_the_ranks(#[case] layout: &str, #[case] sets: &[&str]) {
        let layers = ConfigLayers::new().with_layout(layout).unwrap();
        let sets = [&["model.layers=8"], sets].concat();
        let set = |layers: ConfigLayers, set: &&str| layers.with_set(set).unwrap();
        let config = sets.iter().fold(layers, set).load().unwrap();
        let layout = config.layout(None).unwrap();
        let model = config.planned_model(&layout).unwrap();
        let mut known = HashMap::new();
        let mut split = Split {
            known: &mut known,
            model: &model,
            alike: model.alike_blocks(),
            grid: grid(&layout),
            is_shared: layout.pp > 1,
        };
        for chunks in config.parallel.stages(&layout, model.layers).unwrap() {
            let by_part = split.by_part(&chunks).unwrap();
            assert_eq!(by_part, split.as_a_whole(&chunks).unwrap(), "{chunks:?}");
            assert!(by_part.elements() > 0);
        }
    }
}
