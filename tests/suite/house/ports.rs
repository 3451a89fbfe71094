//! The program of `examples/ports`: models of Burn's zoo, and their ports to several ranks.

use std::{fs, process::Command};

use super::{learner::num_common, outside::program, rules::root};
use crate::{
    house::docs::{bare, blocks},
    models::transformers::fixture,
};

const MODELS: [&str; 2] = ["llama", "bert"];

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// A row that the program prints.
#[derive(Debug)]
struct Row {
    model: String,
    rank: usize,
    ranks: usize,
    /// The distance of the logits to the original's, and to Transformers'.
    logits: [f32; 2],
    losses: [f32; 2],
    /// The distance of the losses to Transformers'.
    losses_distance: f32,
    read_back: Option<f32>,
}

impl Row {
    /// Reads `llama 0 of 2 1.2e-7 3.4e-7 4.85 4.63 2.4e-6 2.4e-7`.
    fn parse(line: &str) -> Self {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| columns[at].parse::<f32>().unwrap();
        Self {
            model: columns[0].to_owned(),
            rank: columns[1].parse().unwrap(),
            ranks: columns[3].parse().unwrap(),
            logits: [number(4), number(5)],
            losses: [number(6), number(7)],
            losses_distance: number(8),
            read_back: columns[9].parse().ok(),
        }
    }
}

#[test]
fn ports_compute_and_train_what_the_originals_do() {
    let output = Command::new(program("ports"))
        .args(MODELS.map(fixture))
        .env("RAYON_NUM_THREADS", "1")
        .output()
        .unwrap();
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8(printed).unwrap();
    assert!(output.status.success(), "{printed}");
    let rows: Vec<Row> = printed.lines().skip(1).map(Row::parse).collect();
    let places = rows
        .iter()
        .map(|row| (row.model.as_str(), row.ranks, row.rank));
    let of_model = |model| {
        let ranks = [1, 2, 4].into_iter();
        ranks.flat_map(move |ranks| (0..ranks).map(move |rank| (model, ranks, rank)))
    };
    let expected: Vec<_> = MODELS.into_iter().flat_map(of_model).collect();
    assert_eq!(places.collect::<Vec<_>>(), expected, "{printed}");
    for row in rows {
        assert!(row.logits.iter().all(|far| *far < 1e-5), "{row:?}");
        assert!(row.losses_distance < 2e-5, "{row:?}");
        assert!(
            row.losses[1] < row.losses[0] - 0.02,
            "it does not learn: {row:?}"
        );
        assert_eq!(row.read_back.is_some(), row.rank == 0, "{row:?}");
        assert!(row.read_back.is_none_or(|far| far < 1e-5), "{row:?}");
    }
}

#[test]
fn the_page_counts_the_lines_that_a_port_adds() {
    let page = read("docs/porting.md");
    for model in MODELS {
        let [original, port] = ["", "_port"].map(|end| {
            let path = format!("examples/ports/src/{model}{end}.rs");
            read(&path)
        });
        let [original, port] = [&original, &port].map(|text| text.lines().collect::<Vec<_>>());
        let added = port.len() - num_common(&original, &port);
        let row = format!("| `{model}.rs` | `{model}_port.rs` | {added} |");
        assert!(page.contains(&row), "docs/porting.md has no {row}");
    }
}

#[test]
fn the_page_shows_the_code_of_a_port() {
    let shown = blocks(&read("docs/porting.md"), "rust");
    assert!(shown.len() >= 2, "only {} blocks", shown.len());
    let port = bare(&read("examples/ports/src/llama_port.rs"));
    for block in shown {
        let block = bare(&block);
        assert!(port.contains(&block), "nowhere in llama_port.rs:\n{block}");
    }
}
