//! Files and records of plain modules, in and out of shards.

mod column_major;
mod counted;
mod modules;
mod replicas;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use burn::{
    module::Module,
    prelude::Device,
    store::ModuleRecord,
    tensor::quantization::{Calibration, QuantValue},
};
use burn_store::{
    BurnToPyTorchAdapter, BurnpackStore, ModuleSnapshot, PytorchStore, SafetensorsStore,
};
use megaburn_collective::{Group, GroupOptions, RankFailure, run_threads};
use megaburn_parallel::{ParallelPlan, ShardedQuantizer, parallelize};
use megaburn_records::{Layout, RecordFile, RecordsError, full_record, load_from, load_record};
use rstest::rstest;

use modules::{Parallel, Plain, Planned, Sizes};

const SIZES: [Sizes; 2] = [[13, 6, 8], [32, 5, 12]];

fn ranks<T: Send>(
    size: usize,
    body: impl Fn(Group) -> Result<T, RecordsError> + Sync,
) -> Vec<Result<T, RankFailure<RecordsError>>> {
    run_threads(size, GroupOptions::default(), body)
}

/// The errors of all ranks.
fn errors(size: usize, body: impl Fn(Group) -> Result<(), RecordsError> + Sync) -> Vec<String> {
    let ranks = ranks(size, body).into_iter();
    ranks.map(|rank| rank.unwrap_err().to_string()).collect()
}

fn save_plain(plain: &Plain, path: &Path, layout: Layout) {
    let extension = path.extension().unwrap();
    if extension == "bpk" {
        plain
            .save_into(&mut BurnpackStore::from_file(path))
            .unwrap();
        return;
    }
    let mut store = SafetensorsStore::from_file(path);
    if layout == Layout::Torch {
        store = store.with_to_adapter(BurnToPyTorchAdapter);
    }
    plain.save_into(&mut store).unwrap();
}

#[rstest]
#[case::burnpack("bpk", Layout::Burn)]
#[case::safetensors("safetensors", Layout::Burn)]
#[case::torch_names("safetensors", Layout::Torch)]
fn a_file_of_the_plain_module_is_read_and_written_bit_for_bit(
    #[case] extension: &str,
    #[case] layout: Layout,
) {
    for sizes in SIZES {
        for size in [1, 2, 4] {
            let folder = tempfile::tempdir().unwrap();
            let given = folder.path().join(format!("given.{extension}"));
            let written = folder.path().join(format!("written.{extension}"));
            let plain = Plain::new(sizes);
            save_plain(&plain, &given, layout);
            let found = ranks(size, |group| {
                let module = Parallel::new(sizes, &group)?;
                let module = RecordFile::new(&given).with_layout(layout).load(module)?;
                let up = module.layers[0].weight.val().into_data();
                RecordFile::new(&written)
                    .with_layout(layout)
                    .save(&module, &group)?;
                Ok((group.rank(), up))
            });
            for found in found {
                let (rank, up) = found.unwrap();
                let columns = sizes[2] / size;
                let full = plain.layers[0].weight.val();
                assert_eq!(up, full.narrow(1, rank * columns, columns).into_data());
            }
            let mut read = Plain::new(sizes);
            if extension == "bpk" {
                read.load_from(&mut BurnpackStore::from_file(&written))
                    .unwrap();
            } else if layout == Layout::Torch {
                let store = SafetensorsStore::from_file(&written);
                let mut store = store.with_from_adapter(burn_store::PyTorchToBurnAdapter);
                read.load_from(&mut store).unwrap();
            } else {
                read.load_from(&mut SafetensorsStore::from_file(&written))
                    .unwrap();
            }
            assert_eq!(read.values(), plain.values(), "{sizes:?} on {size} ranks");
        }
    }
}

#[test]
fn a_record_of_the_plain_module_is_read_and_made_again() {
    for size in [1, 4] {
        let plain = Plain::new(SIZES[0]);
        let bytes = plain.clone().into_record().into_bytes().unwrap();
        let found = ranks(size, |group| {
            let record = ModuleRecord::from_bytes(bytes.clone())?;
            let module = load_record(Parallel::new(SIZES[0], &group)?, record)?;
            // Burn's optimizers find their state by identities, which come from the record.
            assert_eq!(module.layers[1].weight.id, plain.layers[1].weight.id);
            full_record(&module, &group)
        });
        for (rank, record) in found.into_iter().enumerate() {
            let record = record.unwrap();
            assert_eq!(record.is_some(), rank == 0);
            if let Some(record) = record {
                let read = Plain::new(SIZES[0]).load_record(record);
                assert_eq!(read.values(), plain.values());
            }
        }
    }
}

/// The module of `tests/tools/torch_module.py`.
mod torch {
    use burn::{module::Module, nn, prelude::Device};
    use megaburn_collective::Group;
    use megaburn_parallel::{
        ParallelError, ParallelLinear, ParallelLinearConfig, Sharded, VocabParallelEmbedding,
        VocabParallelEmbeddingConfig,
    };

    #[derive(Module, Sharded, Debug)]
    pub(super) struct Net {
        pub(super) embedding: VocabParallelEmbedding,
        pub(super) up: ParallelLinear,
        pub(super) down: ParallelLinear,
        #[sharded(replicated = group)]
        pub(super) norm: nn::LayerNorm,
        #[module(skip)]
        group: Group,
    }

    impl Net {
        pub(super) fn new(group: &Group) -> Result<Self, ParallelError> {
            let device = Device::flex();
            let embedding = VocabParallelEmbeddingConfig::new(13, 6).with_name("embedding");
            let up = ParallelLinearConfig::column(6, 8).with_name("up");
            let down = ParallelLinearConfig::row(8, 6).with_name("down");
            Ok(Self {
                embedding: embedding.init(group, &device)?,
                up: up.init(group, &device)?,
                down: down.init(group, &device)?,
                norm: nn::LayerNormConfig::new(6).init(&device),
                group: group.clone(),
            })
        }
    }
}

#[test]
fn a_state_dict_of_pytorch_is_read_transposed_into_shards() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/torch/module.pt");
    let value = |k: usize, i: usize| ((7 * i + 13 * k) % 101) as f32 / 50.0 - 1.0;
    let found = ranks(2, |group| {
        let net = RecordFile::new(&file).load(torch::Net::new(&group)?)?;
        let up: Vec<f32> = net.up.weight.val().into_data().iter().collect();
        let down: Vec<f32> = net.down.weight.val().into_data().iter().collect();
        let gamma: Vec<f32> = net.norm.gamma.val().into_data().iter().collect();
        Ok((up, down, gamma))
    });
    for (rank, found) in found.into_iter().enumerate() {
        let (up, down, gamma) = found.unwrap();
        let mut expected = Vec::new();
        for row in 0..6 {
            // PyTorch's up.weight is [8, 6].
            expected.extend((0..4).map(|column| value(1, (4 * rank + column) * 6 + row)));
        }
        assert_eq!(up, expected);
        let mut expected = Vec::new();
        for row in 0..4 {
            expected.extend((0..6).map(|column| value(3, column * 8 + 4 * rank + row)));
        }
        assert_eq!(down, expected);
        assert_eq!(gamma, (0..6).map(|i| value(5, i)).collect::<Vec<_>>());
    }
}

#[test]
fn names_are_those_after_a_stores_remapping() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("renamed.safetensors");
    let plain = Plain::new(SIZES[0]);
    let store = SafetensorsStore::from_file(&file).with_key_remapping("^layers", "mlp");
    plain.save_into(&mut { store }).unwrap();
    let [error] = &errors(1, |group| {
        RecordFile::new(&file)
            .load(Parallel::new(SIZES[0], &group)?)
            .map(drop)
    })[..] else {
        panic!("one rank");
    };
    let expected = "no tensor `layers.0.weight`, which the module needs with shape [6, 8] (3 more";
    assert!(error.contains(expected), "{error}");
    let found = ranks(2, |group| {
        let store = SafetensorsStore::from_file(&file).with_key_remapping("^mlp", "layers");
        load_from(
            Parallel::new(SIZES[0], &group)?,
            &mut { store },
            Layout::Burn,
        )
        .map(drop)
    });
    found.into_iter().for_each(Result::unwrap);
}

#[test]
fn burns_own_tools_refuse_to_save_a_shard() {
    let found = ranks(2, |group| {
        let module = Parallel::new(SIZES[0], &group)?;
        let record = catch_unwind(AssertUnwindSafe(|| drop(module.clone().into_record())));
        let mut store = BurnpackStore::from_bytes(None);
        let stored = catch_unwind(AssertUnwindSafe(|| drop(module.save_into(&mut store))));
        let text = |result: std::thread::Result<()>| {
            result
                .unwrap_err()
                .downcast_ref::<String>()
                .unwrap()
                .clone()
        };
        Ok([text(record), text(stored)])
    });
    for (rank, texts) in found.into_iter().enumerate() {
        for text in texts.unwrap() {
            let expected =
                format!("`embedding.weight` is the shard [8, 6] of [13, 6] on rank {rank}");
            assert!(text.contains(&expected), "{text}");
            assert!(
                text.contains("megaburn::records::RecordFile::save"),
                "{text}"
            );
        }
    }
}

#[rstest]
#[case::shard([13, 6, 4], "`layers.0.weight` is [6, 4] in the source, but the full parameter is [6, 8], of which it may be one rank's shard")]
#[case::other([13, 7, 8], "`embedding.weight` is [13, 7] in the source, but the full parameter is [13, 6]; the layout is Burn's")]
fn tensors_of_other_shapes_are_refused(#[case] of_file: Sizes, #[case] expected: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("other.safetensors");
    save_plain(&Plain::new(of_file), &file, Layout::Burn);
    for error in errors(2, |group| {
        RecordFile::new(&file)
            .load(Parallel::new(SIZES[0], &group)?)
            .map(drop)
    }) {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn another_layout_is_guessed_and_other_modules_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("torch.safetensors");
    save_plain(&Plain::new(SIZES[0]), &file, Layout::Torch);
    let load = |layout| {
        let mut found = errors(1, |group| {
            let module = Parallel::new(SIZES[0], &group)?;
            RecordFile::new(&file)
                .with_layout(layout)
                .load(module)
                .map(drop)
        });
        found.remove(0)
    };
    // PyTorch calls gamma `weight`.
    let error = load(Layout::Burn);
    assert!(error.contains("no tensor `norm.gamma`"), "{error}");
    assert!(error.contains("the layout is Burn's"), "{error}");

    let torch = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/torch/module.pt");
    for error in errors(2, |group| {
        let mut store = PytorchStore::from_file(&torch).with_key_remapping("^up", "layers.0");
        load_from(torch::Net::new(&group)?, &mut store, Layout::Torch).map(drop)
    }) {
        assert!(error.contains("no tensor `up.weight`"), "{error}");
    }
    let mut plain = Plain::new(SIZES[0]);
    plain.layers.push(plain.qkv.clone());
    let more = folder.path().join("more.bpk");
    save_plain(&plain, &more, Layout::Burn);
    for error in errors(2, |group| {
        RecordFile::new(&more)
            .load(Parallel::new(SIZES[0], &group)?)
            .map(drop)
    }) {
        let expected = "no parameter for tensor `layers.2.weight` of the source";
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_file_that_rank_0_cannot_write_is_an_error_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    for extension in ["bpk", "safetensors"] {
        let file = folder.path().join(format!("there.{extension}"));
        std::fs::write(&file, "mine").unwrap();
        let found = errors(2, |group| {
            RecordFile::new(&file).save(&Parallel::new(SIZES[0], &group)?, &group)
        });
        assert!(
            found[0].contains("exists; choose another name"),
            "{}",
            found[0]
        );
        assert!(
            found[1].contains("rank 0 could not write the file"),
            "{}",
            found[1]
        );
        assert_eq!(std::fs::read(&file).unwrap(), b"mine");
        let found = ranks(2, |group| {
            let module = Parallel::new(SIZES[0], &group)?;
            RecordFile::new(&file)
                .with_overwrite(true)
                .save(&module, &group)?;
            RecordFile::new(&file).load(module).map(drop)
        });
        found.into_iter().for_each(Result::unwrap);
        let nowhere = folder.path().join(format!("nowhere/file.{extension}"));
        let found = errors(2, |group| {
            RecordFile::new(&nowhere).save(&Parallel::new(SIZES[0], &group)?, &group)
        });
        assert!(
            found[1].contains("rank 0 could not write the file"),
            "{}",
            found[1]
        );
    }
}

#[rstest]
#[case(
    "model.mpk",
    "Burn 0.22 has no recorders, so `.mpk` cannot be read or written"
)]
#[case("model.onnx", "the name of the file must end in `.bpk`")]
#[case("model.pt", "PyTorch's own files are only read")]
fn other_formats_are_refused(#[case] name: &str, #[case] expected: &str) {
    for error in errors(2, |group| {
        RecordFile::new(name).save(&Parallel::new(SIZES[0], &group)?, &group)
    }) {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_missing_file_is_named() {
    for error in errors(1, |group| {
        RecordFile::new("nowhere.bpk")
            .load(Parallel::new(SIZES[0], &group)?)
            .map(drop)
    }) {
        assert!(error.contains("cannot read nowhere.bpk"), "{error}");
    }
}

#[test]
fn quantised_shards_are_not_saved() {
    for error in errors(2, |group| {
        let scheme = Device::flex().settings().quantization.scheme;
        let scheme = scheme.with_value(QuantValue::Q8S);
        let quantizer = ShardedQuantizer::new(Calibration::MinMax, scheme);
        let module = quantizer.apply(Parallel::new(SIZES[0], &group)?, &group)?;
        full_record(&module, &group).map(drop)
    }) {
        assert!(
            error.contains("tensor `embedding.weight` is quantised"),
            "{error}"
        );
    }
}

#[test]
fn a_module_that_a_plan_splits_is_saved_as_the_plain_one() {
    let folder = tempfile::tempdir().unwrap();
    let plan = ParallelPlan::new()
        .vocabulary("embedding")
        .column("layers.0")
        .row("layers.1");
    for ranks_of_group in [1, 2, 4] {
        let file = folder.path().join(format!("{ranks_of_group}.bpk"));
        let plain = Plain::new(SIZES[0]);
        let found = ranks(ranks_of_group, |group| {
            let module = Planned::from(plain.clone());
            let module = parallelize(module, &plan, &group)?;
            RecordFile::new(&file).save(&module, &group)?;
            // Another rank's file of another module is read into the same shards.
            let other = Planned::from(Plain::new(SIZES[0]));
            let other = parallelize(other, &plan, &group)?;
            let other = RecordFile::new(&file).load(other)?;
            let up = |module: &Planned| module.layers[0].weight.val().into_data();
            assert_eq!(up(&other), up(&module));
            Ok(())
        });
        found.into_iter().for_each(Result::unwrap);
        let mut read = Plain::new(SIZES[0]);
        read.load_from(&mut BurnpackStore::from_file(&file))
            .unwrap();
        assert_eq!(read.values(), plain.values());
    }
}
