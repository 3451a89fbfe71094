//! The layouts and settings that a search tries.

use megaburn_mesh::Layout;
use megaburn_models::DecoderConfig;
use megaburn_pipeline::ScheduleKind;
use megaburn_train::{
    TrainConfig,
    config::{RecomputeConfig, RecomputeMethod, RecomputeModule},
};

use crate::{error::PlanError, gpu::Gpu, trial::of_layout};

/// The most pipeline stages.
const MOST_STAGES: usize = 64;
/// The fewest tokens of a sequence on each context-parallel rank.
const LEAST_TOKENS: usize = 1024;
/// The sizes of micro-batches.
const MICRO_BATCHES: [usize; 5] = [1, 2, 4, 8, 16];

/// How a run recomputes activations: the less, the faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Recomputed {
    /// Nothing.
    Nothing,
    /// Norms and activation functions.
    Modules,
    /// Every layer.
    Layers,
}

impl Recomputed {
    /// The fastest first.
    pub(crate) const ALL: [Self; 3] = [Self::Nothing, Self::Modules, Self::Layers];

    fn config(self) -> RecomputeConfig {
        let modules = vec![RecomputeModule::Norm, RecomputeModule::Activation];
        let none = RecomputeConfig::default();
        match self {
            Self::Nothing => none,
            Self::Modules => RecomputeConfig { modules, ..none },
            Self::Layers => RecomputeConfig {
                modules: vec![RecomputeModule::Norm],
                method: RecomputeMethod::Uniform,
                ..none
            },
        }
    }
}

/// A layout with the settings that decide in which order and how large its passes are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) layout: Layout,
    pub(crate) micro_batch: usize,
    /// The schedule and its chunks, in a pipeline.
    pub(crate) schedule: Option<(ScheduleKind, Option<usize>)>,
}

/// Settings that trade time for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Settings {
    pub(crate) zero: u8,
    pub(crate) fused_loss: bool,
    pub(crate) recomputed: Recomputed,
}

impl Candidate {
    /// Every layout of `gpus` ranks that a divisor, a node or the model's number of layers does not
    /// exclude, with each size of micro-batch that divides the batch, and each schedule.
    ///
    /// # Errors
    /// The configuration has no model.
    pub(crate) fn all(config: &TrainConfig, gpus: usize, gpu: Gpu) -> Result<Vec<Self>, PlanError> {
        let mut all = Vec::new();
        let alone = of_layout(config, Layout::SINGLE);
        let model = alone.planned_model(&Layout::SINGLE)?;
        for layout in layouts(config, &model, gpus, gpu) {
            for micro_batch in MICRO_BATCHES {
                let mut train = config.train.clone();
                train.micro_batch = micro_batch;
                if train.num_micro_batches(layout.dp).is_err() {
                    continue;
                }
                all.extend(schedules(layout.pp).into_iter().map(|schedule| Self {
                    layout,
                    micro_batch,
                    schedule,
                }));
            }
        }
        Ok(all)
    }

    /// The stages of ZeRO to try. Without copies of a parameter there is nothing to shard; with
    /// copies, stage 1 takes less memory than 0 and is no slower.
    pub(crate) fn zeros(&self) -> &'static [u8] {
        match self.layout.dp * self.layout.cp {
            1 => &[0],
            _ => &[1, 2, 3],
        }
    }

    /// `config` with this layout and these settings.
    pub(crate) fn config(&self, config: &TrainConfig, settings: Settings) -> TrainConfig {
        let mut config = of_layout(config, self.layout);
        config.train.micro_batch = self.micro_batch;
        if let Some((kind, chunks)) = self.schedule {
            config.parallel.schedule = Some(kind);
            config.parallel.chunks = chunks;
        }
        settings.set(&mut config);
        config
    }
}

impl Settings {
    /// Writes these settings into a configuration.
    pub(crate) fn set(self, config: &mut TrainConfig) {
        config.parallel.zero = self.zero;
        config.train.fused_linear_cross_entropy = self.fused_loss;
        config.recompute = self.recomputed.config();
    }
}

/// The settings of `found` that differ from those of `config`, as `--set` takes them.
pub(crate) fn changed(config: &TrainConfig, found: &TrainConfig) -> Vec<String> {
    let mut settings = Vec::new();
    let mut set = |is_other: bool, text: String| {
        if is_other {
            settings.push(text);
        }
    };
    let (before, after) = (&config.parallel, &found.parallel);
    set(
        before.zero != after.zero,
        format!("parallel.zero={}", after.zero),
    );
    if let Some(kind) = after.schedule {
        let is_other = before
            .schedule
            .unwrap_or(ScheduleKind::OneForwardOneBackward)
            != kind;
        set(is_other, format!("parallel.schedule={kind}"));
    }
    if let Some(chunks) = after.chunks {
        set(
            before.chunks != after.chunks,
            format!("parallel.chunks={chunks}"),
        );
    }
    let (before, after) = (&config.train, &found.train);
    set(
        before.micro_batch != after.micro_batch,
        format!("train.micro_batch={}", after.micro_batch),
    );
    set(
        before.fused_linear_cross_entropy != after.fused_linear_cross_entropy,
        format!(
            "train.fused_linear_cross_entropy={}",
            after.fused_linear_cross_entropy
        ),
    );
    let (before, after) = (&config.recompute, &found.recompute);
    let names: Vec<_> = after
        .modules
        .iter()
        .map(|module| format!("\"{}\"", name(module)))
        .collect();
    set(
        before.modules != after.modules,
        format!("recompute.modules=[{}]", names.join(",")),
    );
    set(
        before.method != after.method,
        format!("recompute.method={}", name(&after.method)),
    );
    set(
        before.num_layers != after.num_layers,
        format!("recompute.num_layers={}", after.num_layers),
    );
    set(
        before.offload != after.offload,
        format!("recompute.offload={}", after.offload),
    );
    set(
        before.keep_attention != after.keep_attention,
        format!("recompute.keep_attention={}", after.keep_attention),
    );
    settings
}

/// The name of a value in a configuration.
fn name(value: &impl serde::Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    value.as_str().unwrap_or_default().to_string()
}

/// The divisors of `number` up to `most`.
fn divisors(number: usize, most: usize) -> impl Iterator<Item = usize> {
    (1..=most.min(number)).filter(move |divisor| number.is_multiple_of(*divisor))
}

fn layouts(config: &TrainConfig, model: &DecoderConfig, gpus: usize, gpu: Gpu) -> Vec<Layout> {
    let longest = config.data.seq_lens().into_iter().max().unwrap_or(1);
    let experts = model.experts.as_ref().map_or(0, |experts| experts.num);
    let layers = model.layers;
    let mut all = Vec::new();
    for tp in divisors(gpus, gpu.gpus_per_node) {
        for pp in divisors(gpus / tp, MOST_STAGES.min(layers)) {
            for cp in divisors(gpus / tp / pp, (longest / LEAST_TOKENS).max(1)) {
                let dp = gpus / tp / pp / cp;
                if dp > config.train.global_batch {
                    continue;
                }
                let ranks = tp * cp * dp;
                for etp in [1, tp]
                    .into_iter()
                    .take(if tp > 1 && experts > 0 { 2 } else { 1 })
                {
                    for ep in divisors(ranks, experts.max(1)) {
                        let splits = experts.is_multiple_of(ep) && ranks.is_multiple_of(ep * etp);
                        if experts > 0 && !splits {
                            continue;
                        }
                        all.push(Layout {
                            tp,
                            cp,
                            pp,
                            dp,
                            ep,
                            etp,
                            sp: tp > 1,
                        });
                    }
                }
            }
        }
    }
    all
}

/// The schedules of a pipeline of `pp` ranks, with their chunks.
fn schedules(pp: usize) -> Vec<Option<(ScheduleKind, Option<usize>)>> {
    if pp == 1 {
        return vec![None];
    }
    [
        (ScheduleKind::OneForwardOneBackward, None),
        (ScheduleKind::Interleaved, Some(2)),
        (ScheduleKind::Interleaved, Some(4)),
        (ScheduleKind::ZbH1, None),
        (ScheduleKind::ZbV, None),
    ]
    .map(Some)
    .to_vec()
}
