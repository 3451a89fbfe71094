//! Runs that move between Megatron-LM and megaburn.
//!
//! `tests/tools/megatron_runs.py` made the fixtures, and continues with Megatron-Core what is
//! exported: see `benches/results/megatron_runs.md`.

mod buckets;
mod exported;
mod moved;
mod refused;
mod weights_only;
mod written_buckets;

use std::{
    fs,
    fs::File,
    io::Write,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use megaburn::train::{
    ConfigLayers, TrainConfig, TrainError,
    megatron::{FromMegatronConfig, Imported, from_megatron},
};
use megaburn_test_support::archive::fixture_in;
use megaburn_torch::{
    pickle::Tree,
    pt::{PtFile, PtWriter},
};

/// Steps of Megatron-Core before the checkpoint, and the last step of megaburn after it.
const FIRST: u64 = 10;
const MIDDLE: u64 = 30;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .canonicalize()
        .unwrap()
}

fn fixture(name: &str) -> PathBuf {
    let folder = root().join("tests/fixtures/megatron-runs");
    fixture_in(&folder, name, Path::new(env!("CARGO_TARGET_TMPDIR")))
}

/// Imports all that a checkpoint has.
fn import(from: &Path, to: &Path) -> Result<Imported, TrainError> {
    from_megatron(from, to, &FromMegatronConfig::new())
}

/// The configuration of a run under a layout, which reads the data of the fixtures.
fn config(run: &Path, layout: &str, sets: &[&str]) -> TrainConfig {
    let data = root().join("tests/fixtures/megatron-dataset/data_document");
    let paths = [
        format!("data.path={:?}", data.display().to_string()),
        format!(
            "data.cache_dir={:?}",
            run.join("cache").display().to_string()
        ),
    ];
    let layers = ConfigLayers::new()
        .with_run(&run.display().to_string())
        .unwrap();
    let layers = layers.with_layout(layout).unwrap();
    let mut sets = paths.iter().map(String::as_str).chain(sets.iter().copied());
    let layers = sets.try_fold(layers, |layers, set| layers.with_set(set));
    layers.unwrap().load().unwrap()
}

/// The entries of a dict that is written.
type Entries = Vec<(Tree, Tree)>;

/// A value of `common.pt`.
fn copied(file: &PtFile, name: &str) -> Tree {
    Tree::copy_of(file.root().get(name).unwrap(), 10_000).unwrap()
}

/// A copy of the first iteration of a fixture, in which `change` has changed the dict of `common.pt`.
fn changed(to: &Path, name: &str, change: impl FnOnce(&mut Entries)) {
    let from = fixture(name).join("iter_0000010");
    fs::create_dir(to).unwrap();
    for file in fs::read_dir(&from).unwrap() {
        let file = file.unwrap();
        if file.file_name() != "common.pt" {
            symlink(file.path(), to.join(file.file_name())).unwrap();
        }
    }
    write_changed(&to.join("common.pt"), name, change);
}

/// Writes the `common.pt` of a fixture with a change.
fn write_changed(to: &Path, name: &str, change: impl FnOnce(&mut Entries)) {
    let common = PtFile::open(fixture(name).join("iter_0000010/common.pt")).unwrap();
    let Tree::Dict(mut entries) = Tree::copy_of(common.root(), 100_000).unwrap() else {
        panic!("common.pt is a dict");
    };
    change(&mut entries);
    let file = File::create_new(to).unwrap();
    let mut writer = PtWriter::new(file, &Tree::Dict(entries)).unwrap();
    // The optimizer of `pp2` has one.
    for (_, tensor) in common.tensors().unwrap() {
        let bytes = common.read(&tensor).unwrap();
        let write = |out: &mut dyn Write| out.write_all(&bytes);
        writer.storage(tensor.storage_key(), write).unwrap();
    }
    writer.finish().unwrap();
}

/// The dict under a key: its entries, or the attributes of an object.
fn inner<'a>(entries: &'a mut Entries, key: &str) -> &'a mut Entries {
    let found = entries.iter_mut().find(|(name, _)| *name == key.into());
    match &mut found.unwrap().1 {
        Tree::Dict(entries) => entries,
        Tree::Object {
            state: Some(state), ..
        } => match &mut **state {
            Tree::Dict(entries) => entries,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

fn set(entries: &mut Entries, key: &str, value: impl Into<Tree>) {
    entries.retain(|(name, _)| *name != key.into());
    entries.push((key.into(), value.into()));
}

/// A copy of a fixture in which arguments have other values.
fn with_arguments(to: &Path, name: &str, arguments: &[(&str, Tree)]) {
    changed(to, name, |common| {
        let args = inner(common, "args");
        for (argument, value) in arguments {
            set(args, argument, value.clone());
        }
    });
}
