//! What an export writes.

use std::fs;

use megaburn::train::{
    config::{AmaxCompute, Fp8Format, PrecisionConfig, PrecisionRecipe},
    megatron::{FromMegatronConfig, from_megatron, to_megatron},
};
use megaburn_torch::{
    DType,
    dcp::DcpDir,
    pickle::Tree,
    pt::{PtFile, tensor_tree},
};
use rstest::rstest;
use serde_json::json;

use super::{
    FIRST, changed, config, copied, fixture, import, inner, set, with_arguments, write_changed,
};
use crate::runs::resume::train;

/// An argument of an exported checkpoint.
fn argument(common: &PtFile, name: &str) -> Tree {
    let value = common.root().get("args").unwrap().attribute(name).unwrap();
    Tree::copy_of(value, 100).unwrap()
}

#[test]
fn a_run_that_began_here_has_all_arguments_that_megatron_lm_needs() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    import(&fixture("tp2-dp2"), &at("run")).unwrap();
    // Without the original arguments, all that an import needs follows from the configuration.
    fs::remove_file(at("run/megatron-common.pt")).unwrap();
    let notes = to_megatron(&at("run"), &at("back"), None).unwrap().notes;
    let is_noted = |notes: &[String]| {
        let mut notes = notes.iter();
        notes.any(|note| note.contains("no `megatron-common.pt`") && note.contains("384 rows"))
    };
    assert!(is_noted(&notes), "{notes:?}");
    let old = from_megatron(
        &fixture("tp2-dp2"),
        &at("old"),
        &FromMegatronConfig::new().with_vocab_size(Some(272)),
    )
    .unwrap();
    let new = from_megatron(
        &at("back"),
        &at("new"),
        &FromMegatronConfig::new().with_vocab_size(Some(272)),
    )
    .unwrap();
    assert_eq!(json!(new.model), json!(old.model));
    assert_eq!(new.progress, old.progress);
    assert_eq!(new.config.optimizer, old.config.optimizer);
    let path = dir.path().join("back/iter_0000010");
    let embedding = DcpDir::open(path).unwrap();
    let embedding = embedding
        .tensor("embedding.word_embeddings.weight")
        .unwrap();
    assert_eq!(embedding.shape(), [384, 16], "a multiple of 128");
    // A checkpoint that was saved here since then still says so.
    train(
        config(&at("run"), "tp1", &["parallel.zero=0"]),
        FIRST + 1,
        FIRST + 1,
    );
    let notes = to_megatron(&at("run"), &at("later"), None).unwrap().notes;
    assert!(is_noted(&notes), "{notes:?}");
}

#[test]
fn layers_have_names_of_their_own_if_the_layers_with_experts_are_a_list() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    changed(&at("iter"), "dp2-ep2", |common| {
        let ones = Tree::List(vec![1.into(), 1.into()]);
        set(inner(common, "args"), "moe_layer_freq", ones);
        set(
            inner(common, "content_metadata"),
            "singleton_local_shards",
            true,
        );
    });
    let old = import(&at("iter"), &at("run")).unwrap();
    let folder = to_megatron(&at("run"), &at("back"), None).unwrap().folder;
    let common = PtFile::open(folder.join("common.pt")).unwrap();
    let about = common.root().get("content_metadata").unwrap();
    let about = ["singleton_local_shards", "non_homogeneous_layers"].map(|name| about.get(name));
    assert_eq!(
        about.map(|of| of.unwrap().as_bool()),
        [Some(false), Some(true)]
    );

    let [stacked, single] = [&at("iter"), &folder].map(|folder| DcpDir::open(folder).unwrap());
    let mut num_layers = 0;
    for (name, of) in stacked.tensors() {
        let Some((state, inside)) = name.split_once("decoder.layers.") else {
            assert!(
                stacked.read(name).unwrap() == single.read(name).unwrap(),
                "{name}"
            );
            continue;
        };
        assert!(single.tensor(name).is_err(), "{name}");
        let all = stacked.read(name).unwrap();
        let layers = all.chunks(all.len() / of.shape()[0]);
        for (layer, values) in layers.enumerate() {
            let name = format!("{state}decoder.layers.{layer}.{inside}");
            assert_eq!(single.tensor(&name).unwrap().shape(), &of.shape()[1..]);
            assert!(single.read(&name).unwrap() == values, "{name}");
            num_layers += 1;
        }
    }
    assert!(num_layers > 0);
    // These names are those of `megatron_checkpoints.py names moe-shared`.
    let objects: Vec<&str> = single.objects().collect();
    for object in [
        "decoder.layers.1.self_attention.linear_proj._extra_state/shard_0_1",
        "decoder.layers.0.mlp.experts.experts.linear_fc2._extra_state/shard_3_4",
    ] {
        assert!(objects.contains(&object), "{objects:?}");
    }

    let new = import(&at("back"), &at("new")).unwrap();
    assert_eq!((&new.model, new.progress), (&old.model, old.progress));
    let folder = to_megatron(&at("new"), &at("again"), None).unwrap().folder;
    let again = DcpDir::open(folder).unwrap();
    assert!(single.objects().eq(again.objects()));
    for (name, _) in single.tensors() {
        assert!(
            single.read(name).unwrap() == again.read(name).unwrap(),
            "{name}"
        );
    }
}

#[rstest]
#[case(0.07 * 800.0, None, Some(56), None)]
#[case(3.5, Some(3.5 / 400.0), None, Some(3.5 / 400.0))]
fn a_warm_up_that_is_a_fraction_of_the_decay_is_kept(
    #[case] samples: f64,
    #[case] of_decay: Option<f64>,
    #[case] expected: Option<u64>,
    #[case] fraction: Option<f64>,
) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    changed(&at("iter"), "tp2-dp2", |common| {
        set(
            inner(common, "opt_param_scheduler"),
            "lr_warmup_steps",
            samples,
        );
        let of_decay = of_decay.map_or(Tree::None, Tree::Float);
        set(inner(common, "args"), "lr_warmup_fraction", of_decay);
    });
    let imported = import(&at("iter"), &at("run")).unwrap();
    let optimizer = &imported.config.optimizer;
    assert_eq!(
        (optimizer.warmup_samples, optimizer.warmup_fraction),
        (expected, fraction)
    );
    let is_noted = imported
        .notes
        .iter()
        .any(|note| note.contains("rounded to 4"));
    assert_eq!(is_noted, fraction.is_some());
    let folder = to_megatron(&at("run"), &at("back"), None).unwrap().folder;
    let common = PtFile::open(folder.join("common.pt")).unwrap();
    let state = common.root().get("opt_param_scheduler").unwrap();
    assert_eq!(
        state.get("lr_warmup_steps").unwrap().as_f64(),
        Some(samples)
    );
}

#[test]
fn a_warm_up_that_is_no_fraction_of_the_decay_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    changed(&at("iter"), "tp2-dp2", |common| {
        set(inner(common, "opt_param_scheduler"), "lr_warmup_steps", 3.5);
        set(inner(common, "args"), "lr_warmup_fraction", 0.5);
    });
    let error = import(&at("iter"), &at("run")).unwrap_err().to_string();
    assert!(
        error.contains("`opt_param_scheduler.lr_warmup_steps`"),
        "{error}"
    );
    assert!(error.contains("it is 3.5"), "{error}");
}

/// Arguments that a run may change, with a value that is not the one of the fixture.
fn other_arguments() -> Vec<(&'static str, Tree)> {
    let ramp = ["4", "4", "16"].map(Tree::from).to_vec();
    vec![
        ("rampup_batch_size", Tree::List(ramp)),
        ("moe_z_loss_coeff", 0.25.into()),
        ("moe_expert_capacity_factor", 2.5.into()),
        ("moe_token_drop_policy", "position".into()),
        ("moe_pad_expert_input_to_capacity", true.into()),
        ("moe_router_force_load_balancing", true.into()),
    ]
}

#[test]
fn arguments_are_those_of_the_run_and_not_of_the_original() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    with_arguments(&at("iter"), "dp2-ep2", &other_arguments());
    for (from, run, other) in [
        (
            at("iter"),
            at("run"),
            fixture("dp2-ep2").join("iter_0000010"),
        ),
        (fixture("dp2-ep2"), at("plain"), at("iter")),
    ] {
        import(&from, &run).unwrap();
        // As if the run had changed its configuration since it was imported.
        let common = run.join("megatron-common.pt");
        fs::copy(other.join("common.pt"), common).unwrap();
    }
    let exported = |run: &str, to: &str| {
        let folder = to_megatron(&at(run), &at(to), None).unwrap().folder;
        PtFile::open(folder.join("common.pt")).unwrap()
    };
    let [run, plain] = [exported("run", "a"), exported("plain", "b")];
    let off = [
        Tree::None,
        Tree::None,
        Tree::None,
        "probs".into(),
        false.into(),
        false.into(),
    ];
    for ((name, other), off) in other_arguments().into_iter().zip(off) {
        assert_eq!(argument(&run, name), other, "{name}");
        assert_eq!(argument(&plain, name), off, "{name}");
    }
}

#[test]
fn a_capacity_that_is_not_of_a_rank_is_noted() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let capacity = [("moe_expert_capacity_factor", 2.5.into())];
    with_arguments(&at("iter"), "dp2-ep2", &capacity);
    import(&at("iter"), &at("run")).unwrap();
    let is_noted = |to: &str| {
        let notes = to_megatron(&at("run"), &at(to), None).unwrap().notes;
        notes
            .iter()
            .any(|note| note.starts_with("moe.capacity_scope is sequence"))
    };
    assert!(!is_noted("rank"));
    let sets = ["moe.capacity_scope=sequence", "parallel.zero=0"];
    train(config(&at("run"), "tp1", &sets), FIRST + 1, FIRST + 1);
    assert!(is_noted("sequence"));
}

#[test]
fn an_argument_that_cannot_be_copied_is_named_and_the_others_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    import(&fixture("tp2-dp2"), &at("run")).unwrap();
    fs::remove_file(at("run/megatron-common.pt")).unwrap();
    write_changed(&at("run/megatron-common.pt"), "tp2-dp2", |common| {
        let tensor = tensor_tree(DType::F32, &[1], "0").unwrap();
        set(inner(common, "args"), "odd", tensor.clone());
        set(inner(common, "content_metadata"), "odd", tensor);
    });
    let exported = to_megatron(&at("run"), &at("back"), None).unwrap();
    let notes = &exported.notes;
    let is_noted = notes
        .iter()
        .any(|note| note.starts_with("argument `odd` of the original run"));
    assert!(is_noted, "{notes:?}");
    let common = PtFile::open(exported.folder.join("common.pt")).unwrap();
    let original = PtFile::open(fixture("tp2-dp2").join("iter_0000010/common.pt")).unwrap();
    assert_eq!(copied(&common, "args"), copied(&original, "args"));
}

/// The arguments of FP8 become `[precision]`, and arguments again.
#[test]
fn the_arguments_of_fp8_are_converted_both_ways() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let of_fp8: [(&str, Tree); 8] = [
        ("fp8", "hybrid".into()),
        ("fp8_recipe", "delayed".into()),
        ("fp8_margin", 1.into()),
        ("fp8_amax_history_len", 16.into()),
        ("fp8_amax_compute_algo", "max".into()),
        ("first_last_layers_bf16", true.into()),
        ("num_layers_at_start_in_bf16", 0.into()),
        ("num_layers_at_end_in_bf16", 1.into()),
    ];
    with_arguments(&at("iter"), "tp2-dp2", &of_fp8);
    let imported = import(&at("iter"), &at("run")).unwrap();
    let expected = PrecisionConfig {
        recipe: PrecisionRecipe::Delayed,
        format: Some(Fp8Format::Hybrid),
        num_layers_at_end_in_bf16: 1,
        amax_history_len: 16,
        amax_compute: AmaxCompute::Max,
        margin: 1,
        ..PrecisionConfig::default()
    };
    assert_eq!(imported.config.precision, expected);
    let note = "the largest magnitudes of the steps before are not converted";
    assert!(imported.notes.iter().any(|found| found.starts_with(note)));
    let exported = to_megatron(&at("run"), &at("back"), None).unwrap();
    let common = PtFile::open(exported.folder.join("common.pt")).unwrap();
    let original = PtFile::open(at("iter").join("common.pt")).unwrap();
    assert_eq!(copied(&common, "args"), copied(&original, "args"));
}

/// So do those of FP4, instead of those of FP8.
#[test]
fn the_arguments_of_fp4_are_converted_both_ways() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let of_fp4: [(&str, Tree); 5] = [
        ("fp4", "e2m1".into()),
        ("fp4_recipe", "nvfp4".into()),
        ("first_last_layers_bf16", true.into()),
        ("num_layers_at_start_in_bf16", 0.into()),
        ("num_layers_at_end_in_bf16", 1.into()),
    ];
    with_arguments(&at("iter"), "tp2-dp2", &of_fp4);
    let imported = import(&at("iter"), &at("run")).unwrap();
    let expected = PrecisionConfig {
        recipe: PrecisionRecipe::Nvfp4,
        num_layers_at_end_in_bf16: 1,
        ..PrecisionConfig::default()
    };
    assert_eq!(imported.config.precision, expected);
    let note = "environment variables that switch parts of NVFP4 off";
    assert!(imported.notes.iter().any(|found| found.starts_with(note)));
    let exported = to_megatron(&at("run"), &at("back"), None).unwrap();
    let common = PtFile::open(exported.folder.join("common.pt")).unwrap();
    let original = PtFile::open(at("iter").join("common.pt")).unwrap();
    assert_eq!(copied(&common, "args"), copied(&original, "args"));
}

#[test]
fn what_is_computed_or_read_otherwise_is_noted() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let arguments = [
        ("bf16", true.into()),
        ("fp32_residual_connection", true.into()),
        ("moe_router_dtype", "fp64".into()),
        ("data_path", Tree::None),
        ("valid_data_path", Tree::List(vec!["valid".into()])),
        ("mock_data", true.into()),
    ];
    with_arguments(&at("iter"), "dp2-ep2", &arguments);
    let notes = import(&at("iter"), &at("run")).unwrap().notes;
    for expected in [
        "argument `fp32_residual_connection` is on",
        "argument `moe_router_dtype` is fp64",
        "argument `data_path` is not set, and `valid_data_path`, `mock_data` are not converted",
    ] {
        assert!(
            notes.iter().any(|note| note.starts_with(expected)),
            "{expected}: {notes:?}"
        );
    }
}
