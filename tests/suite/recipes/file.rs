//! The configuration file of a recipe.

use std::sync::LazyLock;

use megaburn::mesh::Layout;
use serde_json::Value;
use toml::Table;

use super::{
    root,
    table::{Model, Row},
};

/// Settings that all recipes have, unless a model has its own.
const COMMON: &str = r#"
[data]
path = "data/corpus.jsonl"
validation_fraction = 0.001
[train]
dtype = "bf16"
micro_batch = 1
eval_interval = 1000
checkpoint_interval = 1000
[optimizer]
beta1 = 0.9
beta2 = 0.95
weight_decay = 0.1
clip_grad = 1.0
[generate]
prompt = "The "
tokens = 64
"#;

/// What is said above a key, by the key and the beginning of its value.
const COMMENTS: [(&str, &str, &str); 16] = [
    (
        "parallel.zero",
        "1",
        "Data-parallel ranks shard masters and moments.",
    ),
    (
        "parallel.zero",
        "2",
        "Data-parallel ranks shard gradients, masters and moments.",
    ),
    (
        "parallel.zero",
        "3",
        "Data-parallel ranks shard parameters, gradients, masters and moments.",
    ),
    (
        "parallel.chunks",
        "",
        "Each rank has this number of stages, which shortens the bubble and sends more.",
    ),
    (
        "parallel.count_embedding",
        "",
        "The embedding and the loss count as a layer each when layers are split into stages.",
    ),
    (
        "parallel.pipeline_layout",
        "",
        "The layers of each stage: E is the embedding, t a layer, L the loss.",
    ),
    (
        "recompute.modules",
        "",
        "Backward recomputes the outputs of norms and activations.",
    ),
    ("recompute.method", "", "Backward recomputes every layer."),
    (
        "precision.recipe",
        "",
        "Linear layers multiply in FP8, with a scale for each matrix: docs/fp8.md.",
    ),
    (
        "data.path",
        "\"data/corpus",
        "You supply both: the text, and the folder (or tokenizer.json) that came with the model.",
    ),
    (
        "data.path",
        "\"data/wiki",
        "You supply both: sentences, as `megaburn data preprocess --split-sentences` encodes them, \
         and the tokenizer.",
    ),
    (
        "train.fused_linear_cross_entropy",
        "",
        "The loss never holds all logits.",
    ),
    (
        "optimizer.cpu_offload_fraction",
        "",
        "Masters and moments are in host memory: 12 bytes for each parameter.",
    ),
    (
        "moe.aux_loss",
        "",
        "The balancing loss over each micro-batch.",
    ),
    (
        "moe.global_aux_loss",
        "",
        "The balancing loss over the global batch.",
    ),
    (
        "moe.seq_aux_loss",
        "",
        "The balancing loss over each sequence, small because expert biases balance.",
    ),
];

/// The width of comments.
const WIDTH: usize = 116;

/// The text of the file.
pub(super) fn text(row: &Row, model: &Model) -> String {
    let sections = sections(row, model);
    let mut text = header(row, model);
    for (section, table) in &sections {
        write_section(&mut text, section, table, row);
    }
    text
}

fn header(row: &Row, model: &Model) -> String {
    let name = row.name();
    let gpu = row.gpu();
    let gpus = row.gpus();
    let host = if gpus > gpu.gpus_per_node {
        format!(
            ", {} hosts of {}",
            gpus / gpu.gpus_per_node,
            gpu.gpus_per_node
        )
    } else {
        String::new()
    };
    let mut text = "#:schema ../schema.json\n".to_string();
    let mut say = |paragraph: &str| {
        text += &wrapped(paragraph);
        text += "#\n";
    };
    say(&format!(
        "{} ({} parameters) on {gpus} x {gpu}{host}. Generated from configs/recipes.toml: change that, or a copy of \
         this file. Keys that are not set keep the defaults of configs/llama-tiny.toml.",
        model.title,
        spaced(model.parameters)
    ));
    say(&format!("Sizes: {}.", model.source));
    say(&model.schedule);
    say(&row.why);
    say(&format!(
        "docs/recipes.md has its planned memory and speed, and says what to change first. `megaburn plan \
         configs/recipes/{name}.toml --gpu {}` prints them anew.",
        gpu.name
    ));
    let end = text.trim_end_matches("#\n").len();
    text.truncate(end);
    text
}

/// A paragraph as lines of comments.
pub(super) fn wrapped(paragraph: &str) -> String {
    let mut lines = vec!["#".to_string()];
    for word in paragraph.split_whitespace() {
        let last = lines.last_mut().unwrap();
        if last.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(format!("# {word}"));
        } else {
            *last += " ";
            *last += word;
        }
    }
    lines.join("\n") + "\n"
}

/// A number with spaces between groups of three digits.
pub(super) fn spaced(number: usize) -> String {
    let digits = number.to_string();
    let groups = digits.as_bytes().rchunks(3).rev();
    let groups: Vec<_> = groups
        .map(|group| std::str::from_utf8(group).unwrap())
        .collect();
    groups.join(" ")
}

/// The sections in the order of the file.
fn sections(row: &Row, model: &Model) -> Vec<(&'static str, Table)> {
    let mut all: Table = COMMON.parse().unwrap();
    let is_decoder = !model.data.contains_key("dataset");
    if !is_decoder {
        all.remove("generate");
        all["data"]
            .as_table_mut()
            .unwrap()
            .remove("validation_fraction");
        let eval = toml::Value::Integer(10);
        all["train"]
            .as_table_mut()
            .unwrap()
            .insert("eval_batches".into(), eval);
    }
    let run = format!("runs/{}", row.name());
    let own = [
        ("run", &Table::from_iter([("dir".to_string(), run.into())])),
        ("model", &model.model),
        ("data", &model.data),
        ("train", &model.train),
        ("moe", &model.moe),
        ("optimizer", &model.optimizer),
        ("parallel", &parallel(row)),
    ];
    for (name, table) in own {
        add(&mut all, name, table);
    }
    for (name, table) in &row.set {
        add(&mut all, name, table.as_table().unwrap());
    }
    ORDER
        .into_iter()
        .filter_map(|name| match all.remove(name) {
            Some(toml::Value::Table(table)) => Some((name, table)),
            _ => None,
        })
        .filter(|(_, table)| !table.is_empty())
        .collect()
}

/// The sections of a recipe.
const ORDER: [&str; 10] = [
    "run",
    "model",
    "parallel",
    "recompute",
    "precision",
    "data",
    "train",
    "moe",
    "optimizer",
    "generate",
];

fn add(all: &mut Table, name: &str, table: &Table) {
    assert!(ORDER.contains(&name), "the file has no place for [{name}]");
    let section = all
        .entry(name)
        .or_insert_with(|| toml::Value::Table(Table::new()));
    section.as_table_mut().unwrap().extend(table.clone());
}

/// The keys that describe the layout.
fn parallel(row: &Row) -> Table {
    let layout: Layout = row.layout.parse().unwrap();
    let mut table = Table::new();
    let mut set = |key: &str, value: usize| {
        table.insert(key.into(), toml::Value::Integer(value as i64));
    };
    set("ranks", layout.world_size());
    set("tp", layout.tp);
    let rest = [
        ("cp", layout.cp),
        ("pp", layout.pp),
        ("ep", layout.ep),
        ("etp", layout.etp),
    ];
    for (key, degree) in rest.into_iter().filter(|(_, degree)| *degree > 1) {
        set(key, degree);
    }
    if layout.sp {
        table.insert("sp".into(), true.into());
    }
    table
}

fn write_section(text: &mut String, section: &str, table: &Table, row: &Row) {
    *text += &format!("\n[{section}]\n");
    if section == "parallel" {
        *text += &format!("# {}.\n", row.layout);
    }
    let keys = keys(section);
    let position = |name: &str| {
        let found = keys.iter().position(|key| key == name);
        found.unwrap_or_else(|| panic!("there is no key {section}.{name}"))
    };
    let mut sorted: Vec<_> = table.iter().collect();
    sorted.sort_by_key(|(name, value)| (value.is_table(), position(name)));
    for (name, value) in sorted {
        let path = format!("{section}.{name}");
        if let toml::Value::Table(table) = value {
            write_section(text, &path, table, row);
            continue;
        }
        let value = written(value);
        for (_, _, comment) in COMMENTS
            .iter()
            .filter(|(key, start, _)| *key == path && value.starts_with(start))
        {
            *text += &wrapped(comment);
        }
        *text += &format!("{name} = {value}\n");
    }
}

/// The keys of a section in the order of docs/config.md.
fn keys(section: &str) -> Vec<String> {
    let mut schema = &*SCHEMA;
    for name in section.split('.') {
        schema = &schema["properties"][name];
    }
    let properties = schema["properties"].as_object().unwrap();
    properties.keys().cloned().collect()
}

static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let text = std::fs::read_to_string(root().join("configs/schema.json")).unwrap();
    serde_json::from_str(&text).unwrap()
});

/// A value as the other files in configs write it.
fn written(value: &toml::Value) -> String {
    match value {
        toml::Value::Float(number) if *number != 0.0 && number.abs() < 0.001 => {
            format!("{number:e}")
        }
        other => other.to_string(),
    }
}
