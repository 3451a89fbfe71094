//! Expert parallelism on GPUs trains like one GPU.

use std::collections::{BTreeMap, btree_map::Entry};

use megaburn::{
    collective::Group,
    mesh::Layout,
    train::{ConfigLayers, TrainConfig, TrainError},
};

use crate::{
    GroupTest,
    layouts::{Expected, compare, train},
};
use megaburn_kernel_tests::part;
use megaburn_test_support::{
    expert_grid::{Kind, Model, Row, SEED, product},
    gather::gather,
    text::write_random_text,
};

pub(crate) const GROUP_TESTS: &[GroupTest] = &[
    ("every_grid_trains_as_one_gpu_does", grids),
    ("tokens_that_go_once_to_a_gpu_train_as_on_one", many),
];

/// The maximum number of grids; of more, an evenly spaced subset is used.
const MOST: usize = 48;

/// The grids of this number of ranks that split experts. To limit their number, recomputation is
/// tied to the ZeRO stage where there is data or context parallelism, and `drops` to recomputation
/// and family; each of the other values still meets each ZeRO stage.
fn rows(ranks: usize) -> Vec<Row> {
    let shares = |row: &Row| row.layout().dp * row.layout().cp > 1;
    let mut rows = product();
    rows.retain(|row| row.layout().world_size() == ranks && row.ep * row.etp > 1);
    rows.retain(|row| !shares(row) || row.recompute as u8 == row.zero);
    rows.retain(|row| row.drops == ((row.recompute as usize + row.family as usize) % 2 == 1));
    // The step is odd because the innermost columns have two and four values.
    let every = rows.len().div_ceil(MOST) | 1;
    rows.into_iter().step_by(every).collect()
}

/// Models with five of eight experts per token, where each token is sent once to each of two ranks.
fn many(world: &Group) -> Result<(), String> {
    let layouts = [
        "dp2-ep2",
        "tp2-ep2-sp",
        "cp2-ep2",
        "dp4-ep2",
        "tp2-dp2-ep2-sp",
        "pp2-dp2-ep2",
    ];
    let layouts = layouts.map(|text| text.parse::<Layout>().expect("it is a layout"));
    let layouts = layouts
        .into_iter()
        .filter(|layout| layout.world_size() == world.size());
    let kinds = [
        (Kind::Mixtral, false),
        (Kind::Mixtral, true),
        (Kind::DeepseekV3, false),
    ];
    let runs = layouts.flat_map(|layout| {
        kinds.map(|(family, drops)| {
            let experts = 8;
            let top_k = 5;
            let batch = 4 * layout.dp;
            let ffn = 12;
            let kv_heads = 2;
            let layers = 4;
            let seq_len = 16;
            let model = Model {
                experts,
                top_k,
                ffn,
                kv_heads,
                layers,
                seq_len,
                batch,
                drops,
                family,
            };
            let config = move |data: &str| {
                let config = ConfigLayers::new().with_text("many experts", &model.text(data));
                config.and_then(|config| config.with_layout(&layout.to_string())?.load())
            };
            Run {
                name: format!("{layout}, {model:?}"),
                model,
                layout,
                config: Box::new(config),
            }
        })
    });
    compare_all(world, runs.collect())
}

fn grids(world: &Group) -> Result<(), String> {
    let rows = rows(world.size());
    let drops = rows.iter().filter(|row| row.drops).count();
    if rows.len() < 24 || !(8..=rows.len() - 8).contains(&drops) {
        return Err(format!(
            "only {} rows, {drops} with so many tokens an expert",
            rows.len()
        ));
    }
    let run = |row: Row| {
        let name = format!("{row:?}");
        let model = row.model();
        let layout = row.layout();
        Run {
            name,
            model,
            layout,
            config: Box::new(move |data| Ok(row.config(data))),
        }
    };
    compare_all(world, rows.into_iter().map(run).collect())
}

/// Creates the configuration for the text at a path.
type Configure = Box<dyn Fn(&str) -> Result<TrainConfig, TrainError>>;

/// A run that must train like its model on one GPU.
struct Run {
    name: String,
    model: Model,
    layout: Layout,
    config: Configure,
}

fn compare_all(world: &Group, runs: Vec<Run>) -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let path = folder.path().join("text.txt");
    write_random_text(&path, 20_000, SEED);
    let data = path.to_str().expect("the folder's name is text");
    let text = |error: TrainError| error.to_string();
    let mut alone: BTreeMap<Model, Expected> = BTreeMap::new();
    for Run {
        name,
        model,
        layout,
        config,
    } in runs.into_iter().filter(|_| part::is_mine())
    {
        let named = |why: String| format!("{name}: {why}");
        let expected = match alone.entry(model) {
            Entry::Occupied(done) => done.into_mut(),
            Entry::Vacant(place) => {
                let config = ConfigLayers::new().with_text("one GPU", &model.text(data));
                let config = config.and_then(ConfigLayers::load).map_err(text)?;
                let one = Group::single(world.seed());
                let (steps, params) = train(config, &one, Layout::SINGLE).map_err(text)?;
                place.insert((steps, gather(&[params])))
            }
        };
        let found = config(data).and_then(|config| train(config, world, layout));
        compare(&found.map_err(text).map_err(named)?, expected).map_err(named)?;
    }
    Ok(())
}
