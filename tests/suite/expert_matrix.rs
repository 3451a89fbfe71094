//! The grids of experts: models, and the layouts under which each must train as one rank does.

use megaburn::{
    mesh::Layout,
    train::{ConfigLayers, TrainConfig},
};
use serde::Deserialize;

use crate::matrix::EPSILON;

/// Steps that a row trains.
const STEPS: usize = 5;
/// Not a fresh one: of two experts that are all but equally good for a token, rounding chooses, and in
/// some thousand choices a run there is such a pair now and then.
pub(crate) const SEED: u64 = 7;

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Row {
    pub(crate) ep: usize,
    pub(crate) etp: usize,
    pub(crate) tp: usize,
    pub(crate) cp: usize,
    pub(crate) pp: usize,
    pub(crate) dp: usize,
    pub(crate) zero: u8,
    pub(crate) again: Again,
    pub(crate) drops: bool,
    pub(crate) family: Kind,
}

/// What backward computes once more.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Again {
    Nothing,
    Activation,
    Mlp,
    Layers,
}

/// Whose experts they are.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    Mixtral,
    DeepseekV3,
}

/// What a model and its data are, whatever the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Model {
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) ffn: usize,
    pub(crate) kv_heads: usize,
    pub(crate) layers: usize,
    pub(crate) seq_len: usize,
    pub(crate) batch: usize,
    pub(crate) drops: bool,
    pub(crate) family: Kind,
}

impl Row {
    pub(crate) fn layout(&self) -> Layout {
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

    pub(crate) fn is_possible(&self) -> bool {
        let layout = self.layout();
        let shares = self.zero == 0 || self.dp * self.cp > 1;
        layout.world_size() <= 8 && layout.validate().is_ok() && shares
    }

    pub(crate) fn model(&self) -> Model {
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
        // Of DeepSeek's two groups of them.
        let unit = if family == Kind::Mixtral { ep } else { 2 * ep };
        Model {
            experts: unit.max(3).next_multiple_of(unit),
            top_k: 2,
            ffn: 6 * etp,
            kv_heads: tp,
            // A layer without experts, and two with them.
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

    pub(crate) fn config(&self, data: &str) -> TrainConfig {
        let again = match self.again {
            Again::Nothing => "modules = []",
            Again::Activation => "modules = [\"activation\"]",
            Again::Mlp => "modules = [\"mlp\"]",
            Again::Layers => "method = \"uniform\"",
        };
        let text = format!(
            "{}\n[parallel]\nzero = {}\nbucket_size = 3000\n[recompute]\n{again}",
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
    /// Every layout has the same micro-batches, of one sequence.
    pub(crate) fn text(&self, data: &str) -> String {
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
        // Of two, as few as have so many experts.
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

/// All that there can be in a world of up to 8.
pub(crate) fn product() -> Vec<Row> {
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
                    for again in [Again::Nothing, Again::Activation, Again::Mlp, Again::Layers] {
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
                                again,
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
