//! Experts that GPUs share train as those of one GPU do.

use std::collections::{BTreeMap, btree_map::Entry};

use megaburn::{
    collective::Group,
    mesh::Layout,
    train::{ConfigLayers, TrainError},
};

use crate::{
    GroupTest,
    expert_matrix::{Model, Row, SEED, product},
    gather::gather,
    layouts::{Expected, compare, train},
    text::write_random_text,
};

pub(crate) const GROUP_TESTS: &[GroupTest] = &[("every_grid_trains_as_one_gpu_does", grids)];

/// Of more grids than these, so many evenly.
const MOST: usize = 48;

/// Of all grids of so many ranks that share experts those where each of the other values goes with each level
/// of sharing, where there is a choice of these.
fn rows(ranks: usize) -> Vec<Row> {
    let shares = |row: &Row| row.layout().dp * row.layout().cp > 1;
    let mut rows = product();
    rows.retain(|row| row.layout().world_size() == ranks && row.ep * row.etp > 1);
    rows.retain(|row| !shares(row) || row.again as u8 == row.zero);
    rows.retain(|row| row.drops == ((row.again as usize + row.family as usize) % 2 == 1));
    // Odd, as the innermost columns have two and four values.
    let every = rows.len().div_ceil(MOST) | 1;
    rows.into_iter().step_by(every).collect()
}

fn grids(world: &Group) -> Result<(), String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let path = folder.path().join("text.txt");
    write_random_text(&path, 20_000, SEED);
    let data = path.to_str().expect("the folder's name is text");
    let text = |error: TrainError| error.to_string();
    let mut alone: BTreeMap<Model, Expected> = BTreeMap::new();
    let rows = rows(world.size());
    for row in &rows {
        let named = |why: String| format!("{row:?}: {why}");
        let model = row.model();
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
        let found = train(row.config(data), world, row.layout()).map_err(text).map_err(named)?;
        compare(&found, expected).map_err(named)?;
    }
    let drops = rows.iter().filter(|row| row.drops).count();
    match rows.len() >= 24 && (8..=rows.len() - 8).contains(&drops) {
        true => Ok(()),
        false => Err(format!("only {} rows, {drops} with so many tokens an expert", rows.len())),
    }
}
