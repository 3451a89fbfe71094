//! Changes that make a run fit into the memory of its GPUs.

use megaburn_mesh::Layout;
use megaburn_train::{
    TrainConfig,
    config::{RecomputeMethod, RecomputeModule},
};
use serde::Serialize;

use crate::{error::PlanError, gpu::Gpu, trial::Trials};

/// The most settings that are changed together.
const MOST_CHANGES: usize = 4;
/// The number of changes that are listed.
const LISTED: usize = 5;

/// A change of a configuration that makes it fit, with what it leads to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// The layout, if it is another one.
    pub layout: Option<Layout>,
    /// The settings, as `--set` takes them.
    pub settings: Vec<String>,
    /// Memory of the fullest stage.
    pub total_bytes: usize,
    /// Time of a step.
    pub step_ms: f64,
}

impl Change {
    /// The flags that make this change.
    pub fn flags(&self) -> String {
        flags(self.layout, &self.settings)
    }
}

/// A layout and settings as flags of `megaburn train`.
pub(crate) fn flags(layout: Option<Layout>, settings: &[String]) -> String {
    let layout = layout.map(|layout| format!("--layout {layout}"));
    let settings = settings.iter().map(|set| match set.contains(['"', '[']) {
        true => format!("--set '{set}'"),
        false => format!("--set {set}"),
    });
    layout
        .into_iter()
        .chain(settings)
        .collect::<Vec<_>>()
        .join(" ")
}

/// One way to save memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Saving {
    Zero(u8),
    FusedLoss,
    RecomputeModules,
    RecomputeAll,
    MicroBatch(usize),
    Tp(usize),
    Pp(usize),
    Cp(usize),
}

impl Saving {
    /// Which savings exclude each other.
    fn kind(self) -> u8 {
        match self {
            Self::Zero(_) => 0,
            Self::FusedLoss => 1,
            Self::RecomputeModules | Self::RecomputeAll => 2,
            Self::MicroBatch(_) => 3,
            Self::Tp(_) => 4,
            Self::Pp(_) => 5,
            Self::Cp(_) => 6,
        }
    }

    /// The savings that `config` does not make yet.
    fn all(config: &TrainConfig, layout: &Layout, gpu: Gpu) -> Vec<Self> {
        let mut all: Vec<_> = (config.parallel.zero + 1..=3).map(Self::Zero).collect();
        if !config.train.fused_linear_cross_entropy {
            all.push(Self::FusedLoss);
        }
        let recompute = &config.recompute;
        if recompute.method == RecomputeMethod::None {
            if recompute.modules.is_empty() {
                all.push(Self::RecomputeModules);
            }
            all.push(Self::RecomputeAll);
        }
        let micro_batch = config.train.micro_batch;
        let smaller = [micro_batch / 2, 1];
        let smaller = smaller
            .into_iter()
            .filter(|size| (1..micro_batch).contains(size));
        all.extend(smaller.map(Self::MicroBatch));
        let doubled = |degree: usize, most: usize| {
            let degrees = std::iter::successors(Some(2 * degree), |degree| Some(2 * degree));
            degrees.take_while(move |degree| *degree <= most)
        };
        all.extend(doubled(layout.tp, gpu.gpus_per_node).map(Self::Tp));
        all.extend(doubled(layout.pp, 16).map(Self::Pp));
        all.extend(doubled(layout.cp, 8).map(Self::Cp));
        all.dedup();
        all
    }

    /// Applies the saving to a configuration whose degrees are those of `layout`.
    fn apply(self, config: &mut TrainConfig, layout: &mut Layout) -> Option<()> {
        match self {
            Self::Zero(zero) => config.parallel.zero = zero,
            Self::FusedLoss => config.train.fused_linear_cross_entropy = true,
            Self::RecomputeModules => {
                config.recompute.modules = vec![RecomputeModule::Norm, RecomputeModule::Activation];
            }
            Self::RecomputeAll => {
                config.recompute.method = RecomputeMethod::Uniform;
                config
                    .recompute
                    .modules
                    .retain(|module| *module == RecomputeModule::Norm);
            }
            Self::MicroBatch(size) => config.train.micro_batch = size,
            Self::Tp(degree) => {
                layout.dp = fewer(layout.dp, degree / layout.tp)?;
                layout.tp = degree;
                layout.sp = true;
            }
            Self::Pp(degree) => {
                layout.dp = fewer(layout.dp, degree / layout.pp)?;
                layout.pp = degree;
            }
            Self::Cp(degree) => {
                layout.dp = fewer(layout.dp, degree / layout.cp)?;
                layout.cp = degree;
            }
        }
        Some(())
    }

    /// The setting, unless a layout says it.
    fn setting(self) -> Option<String> {
        Some(match self {
            Self::Zero(zero) => format!("parallel.zero={zero}"),
            Self::FusedLoss => "train.fused_linear_cross_entropy=true".to_string(),
            Self::RecomputeModules => "recompute.modules=[\"norm\",\"activation\"]".to_string(),
            Self::RecomputeAll => "recompute.method=uniform".to_string(),
            Self::MicroBatch(size) => format!("train.micro_batch={size}"),
            Self::Tp(_) | Self::Pp(_) | Self::Cp(_) => return None,
        })
    }
}

/// The data-parallel degree that is left when another degree grows by `times`.
fn fewer(dp: usize, times: usize) -> Option<usize> {
    dp.is_multiple_of(times).then_some(dp / times)
}

/// The changes with which a run fits on the same GPUs, the fastest first. All changes of one or two
/// settings are tried, and larger ones only while none fits.
pub(crate) fn that_fit(
    config: &TrainConfig,
    layout: &Layout,
    gpu: Gpu,
) -> Result<Vec<Change>, PlanError> {
    let savings = Saving::all(config, layout, gpu);
    let trials = Trials::new(gpu, 0);
    let mut sets: Vec<Vec<Saving>> = vec![Vec::new()];
    let mut found = Vec::new();
    for num in 1..=MOST_CHANGES {
        sets = larger(&sets, &savings);
        let tried = sets
            .iter()
            .filter_map(|set| with(&trials, (config, layout), set));
        found.extend(tried);
        if num >= 2 && !found.is_empty() {
            break;
        }
    }
    found.sort_by(|one, other| one.step_ms.total_cmp(&other.step_ms));
    found.truncate(LISTED);
    Ok(found)
}

/// Every set of savings with one more than `sets` have.
fn larger(sets: &[Vec<Saving>], savings: &[Saving]) -> Vec<Vec<Saving>> {
    let with = |set: &Vec<Saving>| {
        let last = set.last().map(|saving| saving.kind());
        let more = savings
            .iter()
            .filter(move |saving| last.is_none_or(|last| saving.kind() > last));
        let set = set.clone();
        more.map(move |saving| [set.as_slice(), &[*saving]].concat())
            .collect::<Vec<_>>()
    };
    sets.iter().flat_map(with).collect()
}

/// The run with these savings, if it is possible and fits.
fn with(
    trials: &Trials,
    (config, before): (&TrainConfig, &Layout),
    savings: &[Saving],
) -> Option<Change> {
    let mut config = config.clone();
    let mut layout = *before;
    for saving in savings {
        saving.apply(&mut config, &mut layout)?;
    }
    // Without copies of a parameter nothing is sharded.
    let shards = savings
        .iter()
        .any(|saving| matches!(saving, Saving::Zero(_)));
    if shards && layout.dp * layout.cp == 1 {
        return None;
    }
    let trial = trials.run(&config, layout).ok()?;
    Some(Change {
        layout: (layout != *before).then_some(layout),
        settings: savings
            .iter()
            .filter_map(|saving| saving.setting())
            .collect(),
        total_bytes: trial.total_bytes,
        step_ms: trial.step_ms,
    })
}
