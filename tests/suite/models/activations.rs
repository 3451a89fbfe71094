//! `megaburn verify --activations`: where a layout begins to differ.

use std::{collections::BTreeMap, fs, path::Path};

use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn::{
    collective::Group,
    mesh::Layout,
    models::{decoder::ModelOptions, source::ModelSource},
    parallel::{BatchContext, BlockObserver, shard_plan},
    train::{config::Dtype, device::Devices},
    verify::{ActivationReport, Reference, Tolerances, verify_activations_of},
};
use rstest::rstest;
use safetensors::{Dtype as FileDtype, SafeTensors, tensor::TensorView};

use super::transformers::fixture;
use crate::runs::child::Ranks;

/// The blocks of `whole` on one rank, and those of `split` under a layout.
fn compared([whole, split]: [&Path; 2], layout: &str) -> ActivationReport {
    let [whole, split] = [whole, split].map(|path| Reference::open(path).unwrap());
    let layout: Layout = layout.parse().unwrap();
    let tolerances = Tolerances::of(Dtype::F32);
    let dtype = Dtype::F32;
    verify_activations_of(
        [&whole, &split],
        &layout,
        dtype,
        &tolerances,
        Devices::Cpu,
        None,
    )
}

#[rstest]
#[case("llama", 4, &["tp1", "tp2", "tp2-dp2-sp", "cp2", "pp2", "pp4-tp2-sp"])]
#[case("gemma3", 2, &["tp4-sp", "dp2", "tp2-cp2-sp"])]
#[case("mixtral", 2, &["tp2-ep2-dp2-sp", "pp2-dp2"])]
#[case("bert", 2, &["tp2", "dp2"])]
fn blocks_of_every_layout_are_those_of_one_rank(
    #[case] name: &str,
    #[case] blocks: usize,
    #[case] layouts: &[&str],
) {
    let path = fixture(name);
    for layout in layouts {
        let report = compared([&path, &path], layout);
        assert!(report.is_ok(), "{report}");
        let names: Vec<&str> = report
            .blocks
            .iter()
            .map(|block| block.block.as_str())
            .collect();
        let expected = ["embedding".to_string()].into_iter();
        let expected: Vec<String> = expected.chain((0..blocks).map(|n| n.to_string())).collect();
        assert_eq!(names, expected);
        let is_exact = |block: &megaburn::verify::BlockDifference| {
            block.output == 0.0 && block.gradient == 0.0
        };
        assert!(
            *layout != "tp1" || report.blocks.iter().all(is_exact),
            "{report}"
        );
    }
}

/// A copy of a fixture whose file `name` has the tensors that `change` returns.
fn changed(
    fixture: &Path,
    name: &str,
    change: impl FnOnce(&mut BTreeMap<String, (Vec<usize>, Vec<f32>)>),
) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in fs::read_dir(fixture).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    let bytes = fs::read(fixture.join(name)).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let is_f32 = |view: &TensorView<'_>| view.dtype() == FileDtype::F32;
    let floats = all.iter().filter(|(_, view)| is_f32(view));
    let floats = floats.map(|(name, view)| {
        let numbers = view.data().chunks_exact(4);
        let numbers = numbers.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
        (name.to_string(), (view.shape().to_vec(), numbers.collect()))
    });
    let mut floats: BTreeMap<String, (Vec<usize>, Vec<f32>)> = floats.collect();
    change(&mut floats);
    let floats: Vec<(String, Vec<usize>, Vec<u8>)> = floats
        .into_iter()
        .map(|(name, (shape, numbers))| {
            let bytes = numbers.into_iter().flat_map(f32::to_le_bytes);
            (name, shape, bytes.collect())
        })
        .collect();
    let views = floats.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(FileDtype::F32, shape.clone(), bytes).unwrap();
        (name.clone(), view)
    });
    let others = all.iter().filter(|(_, view)| !is_f32(view));
    let others = others.map(|(name, view)| (name.to_string(), view));
    safetensors::serialize_to_file(views.chain(others), None, &dir.path().join(name)).unwrap();
    dir
}

#[rstest]
#[case("self_attn.o_proj", 2, "tp2-dp2-sp")]
#[case("mlp.down_proj", 1, "pp2")]
#[case("mlp.down_proj", 3, "cp2")]
fn an_error_in_one_layer_is_named(
    #[case] module: &str,
    #[case] block: usize,
    #[case] layout: &str,
) {
    let good = fixture("llama");
    let bad = changed(&good, "model.safetensors", |tensors| {
        let name = format!("model.layers.{block}.{module}.weight");
        tensors.get_mut(&name).unwrap().1[5] += 0.5;
    });
    let report = compared([&good, bad.path()], layout);
    assert!(!report.is_ok() && report.error.is_none(), "{report}");
    assert_eq!(
        report.first_output().unwrap().block,
        block.to_string(),
        "{report}"
    );
    // The loss differs, and so does every gradient from the last block on.
    assert_eq!(report.first_gradient().unwrap().block, "3", "{report}");
    let text = report.to_string();
    assert!(
        text.contains(&format!("output differs first after block {block}")),
        "{text}"
    );
    let before = report.blocks[..=block].iter();
    assert!(before.clone().count() == block + 1 && before.clone().all(|b| b.output < 1e-5));
}

/// The outputs of all blocks of a model, `[B, S, H]`, by their names in a reference.
fn hidden_states(path: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let source = ModelSource::open(path).unwrap();
    let device = Device::flex();
    let group = Group::single(0);
    let model = source
        .config()
        .init(&group, &ModelOptions::default(), &device)
        .unwrap();
    let plan = shard_plan(&model).unwrap();
    let model = source.load(model, &plan).unwrap();
    let bytes = fs::read(path.join("reference.safetensors")).unwrap();
    let reference = SafeTensors::deserialize(&bytes).unwrap();
    let tokens = reference.tensor("input_ids").unwrap();
    let ids = tokens.data().chunks_exact(8);
    let ids = ids.map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap()));
    let ids = TensorData::new(ids.collect::<Vec<_>>(), tokens.shape().to_vec());
    let tokens = Tensor::<2, Int>::from_data(ids, &device).swap_dims(0, 1);
    let observer = BlockObserver::default();
    let batch = BatchContext {
        observer: Some(observer.clone()),
        ..BatchContext::default()
    };
    let x = observer.observe(None, model.embed(tokens, &batch));
    model.forward_stage(0, x, &batch);
    let name = |block: Option<usize>| match block {
        Some(number) => format!("hidden.{number}"),
        None => "hidden.embedding".to_string(),
    };
    let found = observer.take().into_iter();
    let values = found.map(|(block, values)| {
        assert!(values.gradient.is_none(), "there was no backward pass");
        let output = values.output.swap_dims(0, 1);
        let shape = output.dims().to_vec();
        (name(block), shape, output.into_data().try_to_vec().unwrap())
    });
    values.collect()
}

#[test]
fn hidden_states_of_the_reference_are_compared() {
    let plain = fixture("llama");
    let hidden = hidden_states(&plain);
    assert_eq!(hidden.len(), 5);
    let with = |from: usize| {
        changed(&plain, "reference.safetensors", |tensors| {
            for (name, shape, mut values) in hidden.clone() {
                let number = name.strip_prefix("hidden.").unwrap().parse::<usize>();
                if number.is_ok_and(|number| number >= from) {
                    values[7] += 1.0;
                }
                tensors.insert(name, (shape, values));
            }
        })
    };
    let same = with(9);
    let report = compared([same.path(), same.path()], "tp2-dp2-sp");
    assert!(report.is_ok(), "{report}");
    assert!(
        report
            .blocks
            .iter()
            .all(|block| block.reference.is_some_and(|r| r < 1e-5))
    );
    // The reference differs from both layouts, which agree.
    let other = with(2);
    let report = compared([other.path(), other.path()], "pp2");
    assert_eq!(report.first_reference().unwrap().block, "2", "{report}");
    assert!(
        !report.is_ok() && report.first_output().is_none(),
        "{report}"
    );

    let wrong = changed(&plain, "reference.safetensors", |tensors| {
        tensors.insert("hidden.1".into(), (vec![2, 2], vec![0.0; 4]));
    });
    let report = compared([wrong.path(), wrong.path()], "tp1");
    let error = report.error.unwrap();
    assert!(
        error.contains("hidden.1") && error.contains("found [2, 2]"),
        "{error}"
    );
}

#[test]
fn the_command_prints_a_table_and_its_exit_code_says_whether_blocks_differ() {
    let path = fixture("llama").display().to_string();
    let run = |args: &[&str]| {
        let args = [&["verify", path.as_str(), "--activations"], args].concat();
        Ranks::command(&args).wait_all().remove(0)
    };
    let ended = run(&["--layout", "tp2-sp", "--layout", "dp2"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(
        ended.stdout.contains("ok     llama tp2-sp\nblock "),
        "{ended:?}"
    );
    assert!(ended.stdout.contains("\nembedding "), "{ended:?}");
    let ended = run(&["--layout", "tp2", "--tol-grad", "0", "--json"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let json: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(json["blocks"].as_array().unwrap().len(), 5);
    assert!(json["blocks"][4]["gradient"].as_f64().unwrap() > 0.0);
    let t5 = fixture("t5").display().to_string();
    let ended = Ranks::command(&["verify", &t5, "--activations"])
        .wait_all()
        .remove(0);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(
        ended
            .stdout
            .contains("`--activations` is t5: it must be used with"),
        "{ended:?}"
    );
}
