//! Experts under every layout of the grid train as on one rank.

use std::collections::BTreeMap;

use megaburn::{mesh::Layout, train::ConfigLayers};
use rstest::rstest;
use serde::Deserialize;

use crate::layouts::grid::{Trained, assert_every_pair, compare, train};
use megaburn_test_support::{
    expert_grid::{Model, Row, SEED, product},
    text::write_random_text,
};

/// The contents of `experts.toml`.
#[derive(Deserialize)]
struct Grids {
    rows: Vec<Row>,
}

fn rows() -> Vec<Row> {
    toml::from_str::<Grids>(include_str!("../../experts.toml"))
        .unwrap()
        .rows
}

/// The value of each column.
fn values(row: &Row) -> [String; 10] {
    let Row {
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
    } = row;
    [
        format!("ep {ep}"),
        format!("etp {etp}"),
        format!("tp {tp}"),
        format!("cp {cp}"),
        format!("pp {pp}"),
        format!("dp {dp}"),
        format!("zero {zero}"),
        format!("{recompute:?}"),
        format!("drops {drops}"),
        format!("{family:?}"),
    ]
}

#[rstest]
fn every_grid_trains_as_one_rank_does(#[values(1, 2, 3, 4, 5, 6, 7, 8)] ep: usize) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    write_random_text(&path, 20_000, SEED);
    let data = path.to_str().unwrap();
    let mut one_rank: BTreeMap<Model, Trained> = BTreeMap::new();
    for row in rows().into_iter().filter(|row| row.ep == ep) {
        let model = row.model();
        let expected = one_rank.entry(model).or_insert_with(|| {
            let text = model.text(data);
            let config = ConfigLayers::new()
                .with_text("one rank", &text)
                .unwrap()
                .load()
                .unwrap();
            train(config, Layout::SINGLE)
        });
        compare(
            &train(row.config(data), row.layout()),
            expected,
            &format!("{row:?}"),
        );
    }
    for (model, run) in &one_rank {
        assert!(run.steps[2].loss != run.steps[0].loss);
        let dropped = run
            .steps
            .iter()
            .map(|step| step.experts.as_ref().unwrap().dropped);
        assert_eq!(dropped.sum::<f64>() > 0.0, model.drops);
    }
}

#[test]
fn the_rows_hold_every_pair_of_values() {
    let rows = rows();
    assert!(rows.iter().all(Row::is_possible));
    assert_every_pair(rows.iter().map(values), product().iter().map(values), 300);
}
