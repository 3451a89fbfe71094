//! The table of recipes, `configs/recipes.toml`.

use std::{
    collections::BTreeMap,
    fs,
    sync::{LazyLock, OnceLock},
};

use megaburn::{
    plan::{Gpu, Plan, PlanConfig},
    train::{ConfigLayers, TrainConfig},
};
use serde::Deserialize;

use super::{file, root};

/// The table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Table {
    pub(super) models: BTreeMap<String, Model>,
    pub(super) recipes: Vec<Row>,
}

/// A published model and how it is trained.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Model {
    /// Its name in sentences.
    pub(super) title: String,
    /// Its number of parameters.
    pub(super) parameters: usize,
    /// Where its sizes are from.
    pub(super) source: String,
    /// What its `config.json` says about them.
    pub(super) published: String,
    /// Where its batch and its learning rate are from.
    pub(super) schedule: String,
    pub(super) model: toml::Table,
    pub(super) data: toml::Table,
    pub(super) train: toml::Table,
    #[serde(default)]
    pub(super) moe: toml::Table,
    pub(super) optimizer: toml::Table,
}

/// A model on GPUs.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Row {
    pub(super) model: String,
    /// The number of GPUs and the kind, such as `64xh100`.
    pub(super) on: String,
    /// What distinguishes it from another recipe for the same GPUs.
    pub(super) variant: Option<String>,
    pub(super) layout: String,
    /// Settings, by section.
    #[serde(default)]
    pub(super) set: toml::Table,
    /// Why this layout, in sentences.
    pub(super) why: String,
    /// What of it was measured, with a link.
    pub(super) measured: Option<String>,
}

impl Row {
    /// The name of its file, without the ending.
    pub(super) fn name(&self) -> String {
        let variant = self.variant.iter().map(|variant| format!("-{variant}"));
        let variant = variant.collect::<String>();
        format!("{}-{}{variant}", self.model, self.on)
    }

    pub(super) fn gpus(&self) -> usize {
        self.on.split_once('x').unwrap().0.parse().unwrap()
    }

    pub(super) fn gpu(&self) -> Gpu {
        self.on.split_once('x').unwrap().1.parse().unwrap()
    }
}

/// A recipe with its file.
#[derive(Debug)]
pub(super) struct Recipe {
    pub(super) row: &'static Row,
    pub(super) model: &'static Model,
    /// What its file says.
    pub(super) text: String,
    pub(super) config: TrainConfig,
    plan: OnceLock<Plan>,
}

impl Recipe {
    /// Its plan, which is made once.
    pub(super) fn plan(&self) -> &Plan {
        self.plan.get_or_init(|| {
            let layout = self.config.layout(None).unwrap();
            let plan = PlanConfig::new(self.config.clone(), layout).with_gpu(self.row.gpu());
            plan.plan()
                .unwrap_or_else(|error| panic!("{}: {error}", self.row.name()))
        })
    }
}

pub(super) static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let text = fs::read_to_string(root().join("configs/recipes.toml")).unwrap();
    toml::from_str(&text).unwrap_or_else(|error| panic!("configs/recipes.toml: {error}"))
});

/// All recipes.
pub(super) static RECIPES: LazyLock<Vec<Recipe>> =
    LazyLock::new(|| TABLE.recipes.iter().map(recipe).collect());

fn recipe(row: &'static Row) -> Recipe {
    let name = row.name();
    let model = TABLE.models.get(&row.model);
    let model = model.unwrap_or_else(|| panic!("{name}: the table has no such model"));
    let text = file::text(row, model);
    let config = ConfigLayers::new().with_text(&name, &text);
    let config = config
        .and_then(ConfigLayers::load)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    Recipe {
        row,
        model,
        text,
        config,
        plan: OnceLock::new(),
    }
}
