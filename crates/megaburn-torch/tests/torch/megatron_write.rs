//! Checkpoints that are written here are read back; `tests/tools/megatron_checkpoints.py` loads
//! them with Megatron-Core.

use std::fs;
use std::path::Path;

use megaburn_torch::dcp::{DcpDir, DcpRecord, DcpWriter};
use megaburn_torch::megatron::{
    MegatronDir, ShardedKey, iteration_folder, write_iteration, write_latest, write_sharded_object,
};
use megaburn_torch::pickle::Tree;

use crate::{check_folder, megatron};

const NUM_RANKS: usize = 3;

/// Copies a part of each tensor and object of a checkpoint, as one of several ranks.
fn copy_rank(from: &MegatronDir, folder: &Path, rank: usize) -> DcpRecord {
    let mut writer = DcpWriter::create(folder, rank).unwrap();
    for (number, (name, tensor)) in from.dcp().tensors().enumerate() {
        // Each tensor is cut along another dim, raggedly.
        let shape = tensor.shape();
        let dim = number % shape.len();
        let rows = shape[dim].div_ceil(NUM_RANKS);
        let start = (rank * rows).min(shape[dim]);
        let mut offsets = vec![0; shape.len()];
        let mut sizes = shape.to_vec();
        offsets[dim] = start;
        sizes[dim] = rows.min(shape[dim] - start);
        let bytes = from.dcp().read_region(name, &offsets, &sizes).unwrap();
        let dtype = tensor.dtype();
        let written = writer.tensor(name, dtype, shape, &offsets, &sizes, |out| {
            out.write_all(&bytes)
        });
        written.unwrap();
    }
    for (number, key) in from.sharded_objects().enumerate() {
        let file = from.sharded_object(&key).unwrap();
        let value = file.root().sequence().unwrap().get(0).unwrap();
        // The random numbers have tensors in them.
        if number % NUM_RANKS == rank && key.key != "rng_state" {
            let value = Tree::copy_of(value, 100_000).unwrap();
            write_sharded_object(&mut writer, &key, value, &[]).unwrap();
        }
    }
    if rank == 0 {
        write_sharded_object(
            &mut writer,
            &ShardedKey::single("rng_state"),
            Tree::None,
            &[],
        )
        .unwrap();
    }
    writer.finish().unwrap()
}

/// The common part, of another iteration.
fn common(from: &MegatronDir, iteration: i64) -> Tree {
    let Some(Tree::Dict(mut entries)) = Tree::copy_of(from.common().root(), 100_000) else {
        panic!("{:?}", from.common().root());
    };
    for (name, value) in &mut entries {
        if *name == "iteration".into() {
            *value = iteration.into();
        }
    }
    Tree::Dict(entries)
}

#[test]
fn what_the_ranks_write_is_read_back() {
    let root = check_folder("megatron");
    let root = root.path();
    let from = MegatronDir::open(megatron("tp2-pp2")).unwrap();
    let folder = root.join(iteration_folder(20));
    let records: Vec<DcpRecord> = (0..NUM_RANKS)
        .map(|rank| copy_rank(&from, &folder, rank))
        .collect();
    let common = common(&from, 20);
    write_iteration(&folder, &records, &common, &[]).unwrap();
    write_latest(root, 10).unwrap();
    write_latest(root, 20).unwrap();

    let dir = MegatronDir::open(root).unwrap();
    assert_eq!(dir.iteration(), Some(20));
    assert_eq!(dir.arg("num_layers").unwrap().as_i64(), Some(2));
    let names =
        |dir: &DcpDir| -> Vec<String> { dir.tensors().map(|(name, _)| name.into()).collect() };
    assert_eq!(names(dir.dcp()), names(from.dcp()));
    for name in names(dir.dcp()) {
        assert_eq!(
            dir.dcp().read(&name).unwrap(),
            from.dcp().read(&name).unwrap(),
            "{name}"
        );
    }
    assert_eq!(
        dir.optimizer().unwrap().len(),
        from.optimizer().unwrap().len()
    );
    let config = fs::read_to_string(folder.join("metadata.json")).unwrap();
    let expected = fs::read_to_string(megatron("tp2-pp2/iter_0000010/metadata.json")).unwrap();
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    assert_eq!(json(&config), json(&expected));

    // Nothing is replaced.
    let error = write_iteration(&folder, &records, &common, &[])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("metadata.json` exists and is not replaced"),
        "{error}"
    );
}

#[test]
fn the_newest_iteration_is_named_only_where_it_may_be() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("latest_checkpointed_iteration.txt");
    for (before, is_replaced) in [("7", true), ("release\n", true), ("a letter", false)] {
        fs::write(&path, before).unwrap();
        let written = write_latest(folder.path(), 8);
        assert_eq!(written.is_ok(), is_replaced);
        let found = fs::read_to_string(&path).unwrap();
        assert_eq!(found, if is_replaced { "8" } else { before });
    }
}

/// Without its files a checkpoint is none: `metadata.json` comes last.
#[test]
fn an_incomplete_checkpoint_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    let from = MegatronDir::open(megatron("tp2-pp2")).unwrap();
    let records = [copy_rank(&from, folder.path(), 0)];
    let error = write_iteration(folder.path(), &records, &Tree::Dict(Vec::new()), &[]);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("elements of a tensor of the shape"),
        "{error}"
    );
    assert!(!folder.path().join("metadata.json").exists());
    let error = MegatronDir::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("it has neither"), "{error}");
}
