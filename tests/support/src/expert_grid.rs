//! The expert grid: models, and the layouts under which each must train as one rank does.

use megaburn::{
    mesh::Layout,
    train::{ConfigLayers, TrainConfig},
};
use serde::Deserialize;

use crate::layout_grid::EPSILON;

/// The number of steps that a row trains.
const STEPS: usize = 5;
/// A fixed seed: if the scores of two experts are nearly equal, rounding decides which one a token
/// takes, and some seeds have such a pair among the thousands of choices of a run.
pub const SEED: u64 = 7;

/// One run of the grid: degrees of the axes and options.
#[derive(Clone, Debug, Deserialize)]
pub struct Row {
    /// Expert-parallel degree.
    pub ep: usize,
    /// Expert-tensor-parallel degree.
    pub etp: usize,
    /// Tensor-parallel degree.
    pub tp: usize,
    /// Context-parallel degree.
    pub cp: usize,
    /// Pipeline-parallel degree.
    pub pp: usize,
    /// Data-parallel degree.
    pub dp: usize,
    /// `parallel.zero`.
    pub zero: u8,
    /// What backward recomputes.
    pub recompute: Recomputed,
    /// Whether experts have a capacity, beyond which tokens are dropped.
    pub drops: bool,
    /// The model family.
    pub family: Kind,
}

/// What backward recomputes.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub enum Recomputed {
    /// Nothing.
    Nothing,
    /// The activation function of each MLP.
    Activation,
    /// Each MLP.
    Mlp,
    /// Each layer.
    Layers,
}

/// A family of models with experts.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Mixtral.
    Mixtral,
    /// DeepSeek-V3.
    DeepseekV3,
}

/// A model and its data, which do not depend on the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Model {
    /// The number of experts.
    pub experts: usize,
    /// The number of experts of a token.
    pub top_k: usize,
    /// The hidden size of an expert.
    pub ffn: usize,
    /// The number of key and value heads.
    pub kv_heads: usize,
    /// The number of layers.
    pub layers: usize,
    /// The length of a sequence.
    pub seq_len: usize,
    /// The number of sequences of a global batch.
    pub batch: usize,
    /// Whether experts have a capacity, beyond which tokens are dropped.
    pub drops: bool,
    /// The model family.
    pub family: Kind,
}

impl Row {
    /// The layout of the ranks.
    pub fn layout(&self) -> Layout {
        let Self {
            ep,
            etp,
            tp,
            cp,
            pp,
            dp,
            ..
        } = *self;
        Layout {
            tp,
            cp,
            pp,
            dp,
            ep,
            etp,
            sp: tp > 1,
        }
    }

    /// Whether the layout is valid and has at most eight ranks.
    pub fn is_possible(&self) -> bool {
        let layout = self.layout();
        let shares = self.zero == 0 || self.dp * self.cp > 1;
        layout.world_size() <= 8 && layout.validate().is_ok() && shares
    }

    /// The model and data that this row trains.
    pub fn model(&self) -> Model {
        let Self {
            ep,
            etp,
            tp,
            cp,
            pp,
            dp,
            drops,
            family,
            ..
        } = *self;
        // DeepSeek has two groups of experts.
        let unit = if family == Kind::Mixtral { ep } else { 2 * ep };
        Model {
            experts: unit.max(3).next_multiple_of(unit),
            top_k: 2,
            ffn: 6 * etp,
            kv_heads: tp,
            // DeepSeek has one dense layer and two with experts.
            layers: if family == Kind::Mixtral {
                pp.max(2)
            } else {
                pp.max(3)
            },
            seq_len: 4 * cp * tp,
            batch: 2 * dp,
            drops,
            family,
        }
    }

    /// The configuration of this row's run on the text at `data`.
    pub fn config(&self, data: &str) -> TrainConfig {
        let recompute = match self.recompute {
            Recomputed::Nothing => "modules = []",
            Recomputed::Activation => "modules = [\"activation\"]",
            Recomputed::Mlp => "modules = [\"mlp\"]",
            Recomputed::Layers => "method = \"uniform\"",
        };
        let text = format!(
            "{}\n[parallel]\nzero = {}\nbucket_size = 3000\n[recompute]\n{recompute}",
            self.model().text(data),
            self.zero
        );
        let layers = ConfigLayers::new()
            .with_text("experts.toml", &text)
            .unwrap();
        layers
            .with_layout(&self.layout().to_string())
            .unwrap()
            .load()
            .unwrap()
    }
}

impl Model {
    /// The configuration as TOML. Micro-batches have one sequence under every layout.
    pub fn text(&self, data: &str) -> String {
        let Self {
            experts,
            top_k,
            ffn,
            kv_heads,
            layers,
            seq_len,
            batch,
            drops,
            family,
        } = self;
        let heads = 2 * kv_heads;
        // With two groups, choose the fewest groups that contain `top_k` experts.
        let groups = (2 * top_k).div_ceil(*experts);
        let (attention, of_experts) = match family {
            Kind::Mixtral => (
                format!("family = \"mixtral\"\nffn = {ffn}\nkv_heads = {kv_heads}\nhead_dim = 4"),
                String::new(),
            ),
            Kind::DeepseekV3 => (
                format!(
                    "family = \"deepseek_v3\"\nffn = {}\nkv_heads = {heads}",
                    2 * ffn
                ),
                format!(
                    "groups = [2, {groups}, 2]\nlayer_freq = \"[0]+[1]*{}\"\nnormalise = true\nscale = 1.5",
                    layers - 1
                ),
            ),
        };
        let shared = match family {
            Kind::Mixtral => String::new(),
            Kind::DeepseekV3 => format!("shared_ffn = {}", 2 * ffn),
        };
        let capacity = if *drops { "capacity_factor = 0.9" } else { "" };
        format!(
            "[model]\n{attention}\nhidden = 16\nlayers = {layers}\nheads = {heads}
            [model.experts]\nnum = {experts}\ntop_k = {top_k}\nffn = {ffn}\n{shared}\n{of_experts}
            [moe]\naux_loss = 0.05\nseq_aux_loss = 0.05\nglobal_aux_loss = 0.05\nz_loss = 0.01\n{capacity}
            [data]\npath = {data:?}\nseq_len = {seq_len}
            [train]\nsteps = {STEPS}\nglobal_batch = {batch}\nmicro_batch = 1
            [optimizer]\nlr = 1e-3\neps = {EPSILON}\nwarmup_steps = 0"
        )
    }
}

/// All combinations of the columns in worlds of up to eight ranks.
pub fn product() -> Vec<Row> {
    let bools = [false, true];
    let mut all = Vec::new();
    for (ep, etp) in (1..=8).flat_map(|ep| [1, 2, 4].map(|etp| (ep, etp))) {
        for (tp, cp) in [
            (1, 1),
            (1, 2),
            (1, 3),
            (1, 4),
            (2, 1),
            (2, 2),
            (2, 4),
            (4, 1),
            (4, 2),
        ] {
            for (pp, dp) in [1, 2, 4]
                .into_iter()
                .flat_map(|pp| (1..=8).map(move |dp| (pp, dp)))
            {
                for zero in 0..4 {
                    for recompute in [
                        Recomputed::Nothing,
                        Recomputed::Activation,
                        Recomputed::Mlp,
                        Recomputed::Layers,
                    ] {
                        for (drops, family) in bools.into_iter().flat_map(|drops| {
                            [Kind::Mixtral, Kind::DeepseekV3].map(|family| (drops, family))
                        }) {
                            all.push(Row {
                                ep,
                                etp,
                                tp,
                                cp,
                                pp,
                                dp,
                                zero,
                                recompute,
                                drops,
                                family,
                            });
                        }
                    }
                }
            }
        }
    }
    all.into_iter().filter(Row::is_possible).collect()
}
