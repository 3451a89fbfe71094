//! Runs that move between Megatron-LM and megaburn.
//!
//! `tests/tools/megatron_runs.py` made the fixtures, and continues with Megatron-Core what is
//! exported: see `benches/results/megatron_runs.md`.

use std::{
    fs,
    fs::File,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use megaburn::{
    report::metrics::{MetricsRecord, read_metrics},
    train::{
        ConfigLayers, TrainConfig,
        megatron::{from_megatron, to_megatron},
    },
};
use megaburn_torch::{
    dcp::DcpDir,
    pickle::{Tree, Value},
    pt::{PtFile, PtWriter},
};
use rstest::rstest;
use serde_json::json;

use crate::{
    house::docs::blocks,
    runs::{
        child::Ranks,
        resume::{Stretch, assert_goes_on, train},
    },
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
    root().join("tests/fixtures/megatron-runs").join(name)
}

/// The losses of Megatron-Core's steps, up to the last of megaburn's.
fn losses(name: &str) -> Vec<f64> {
    let text = fs::read_to_string(fixture(&format!("{name}.json"))).unwrap();
    let file: serde_json::Value = serde_json::from_str(&text).unwrap();
    let losses = file["losses"].as_array().unwrap().iter();
    losses
        .take(MIDDLE as usize)
        .map(|loss| loss.as_f64().unwrap())
        .collect()
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

#[rstest]
#[case("tp2-dp2", "tp2-dp2", &["parallel.zero=1"])]
#[case("tp2-dp2", "pp2-dp2", &["parallel.zero=2"])]
#[case("pp2", "pp2", &[])]
#[case("pp2", "tp2-sp", &[])]
#[case("dp2-ep2", "dp2-ep2", &["parallel.zero=1"])]
#[case("dp2-ep2", "tp2-sp", &["parallel.zero=0"])]
fn a_run_of_megatron_core_goes_on_as_it_would_there(
    #[case] name: &str,
    #[case] layout: &str,
    #[case] sets: &[&str],
) {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let imported = from_megatron(&fixture(name), &run, None).unwrap();
    assert_eq!(imported.progress.step, FIRST);
    let resumed = train(config(&run, layout, sets), MIDDLE, MIDDLE);
    let whole = Stretch {
        losses: losses(name),
        ..Stretch::default()
    };
    assert_goes_on(&resumed, &whole, FIRST, layout);
    // What follows from there is known too: `megatron_runs.py continue` trains it.
    let exported = to_megatron(&run, &dir.path().join("back"), None).unwrap();
    assert!(exported.folder.ends_with("iter_0000030"));
    let common = PtFile::open(exported.folder.join("common.pt")).unwrap();
    let state = common.root().get("opt_param_scheduler").unwrap();
    assert_eq!(state.get("num_steps").unwrap().as_i64(), Some(240));
}

/// A value of `common.pt`.
fn copied(file: &PtFile, name: &str) -> Tree {
    Tree::copy_of(file.root().get(name).unwrap(), 10_000).unwrap()
}

#[rstest]
fn what_is_moved_here_and_back_is_the_same_to_the_bit(
    #[values("tp2-dp2", "pp2", "dp2-ep2")] name: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    from_megatron(&fixture(name).join("iter_0000010"), &run, None).unwrap();
    let back = dir.path().join("back");
    let folder = to_megatron(&run, &back, None).unwrap().folder;
    let latest = fs::read_to_string(back.join("latest_checkpointed_iteration.txt")).unwrap();
    assert_eq!(latest, "10");

    let original = fixture(name).join("iter_0000010");
    let [old, new] = [&original, &folder].map(|folder| DcpDir::open(folder).unwrap());
    assert!(old.objects().eq(new.objects()));
    let has_masters = name != "pp2";
    for (tensor, of) in new.tensors() {
        // An optimizer that is not distributed has no copies of f32 weights.
        let from = match tensor.strip_prefix("optimizer.state.param.") {
            Some(weights) if !has_masters => weights,
            _ => tensor,
        };
        let expected = old.tensor(from).unwrap();
        assert_eq!(
            (of.dtype(), of.shape()),
            (expected.dtype(), expected.shape()),
            "{tensor}"
        );
        assert!(
            old.read(from).unwrap() == new.read(tensor).unwrap(),
            "{tensor}"
        );
    }
    let missing = old
        .tensors()
        .find(|(tensor, _)| new.tensor(tensor).is_err());
    assert!(missing.is_none(), "{missing:?}");

    let [old, new] =
        [&original, &folder].map(|folder| PtFile::open(folder.join("common.pt")).unwrap());
    let mut keys = vec![
        "checkpoint_version",
        "iteration",
        "opt_param_scheduler",
        "content_metadata",
    ];
    if has_masters {
        keys.extend(["args", "optimizer"]);
    }
    for key in keys {
        assert_eq!(copied(&old, key), copied(&new, key), "{key}");
    }
}

#[test]
fn the_commands_of_the_page_move_a_run_both_ways() {
    let page = fs::read_to_string(root().join("docs/megatron-checkpoints.md")).unwrap();
    let commands = blocks(&page, "sh").concat();
    let clone = tempfile::tempdir().unwrap();
    let at = |name: &str| clone.path().join(name);
    fs::create_dir_all(at("target/release")).unwrap();
    let binary = env!("CARGO_BIN_EXE_megaburn-under-test");
    symlink(binary, at("target/release/megaburn")).unwrap();
    symlink(root().join("tests"), at("tests")).unwrap();
    fs::create_dir(at("megatron")).unwrap();
    symlink(fixture("tp2-dp2"), at("megatron/demo")).unwrap();
    let ended = Ranks::shell(&commands, clone.path()).wait_all();
    let ended = &ended[0];
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    assert!(
        ended.stdout.contains("does not record the data"),
        "{}",
        ended.stdout
    );
    let metrics = read_metrics(at("runs/demo/metrics.jsonl")).unwrap();
    let of_steps = metrics.into_iter().filter_map(|record| match record {
        MetricsRecord::Step(step) => Some(step.loss),
        _ => None,
    });
    let resumed = Stretch {
        losses: of_steps.collect(),
        ..Stretch::default()
    };
    let whole = Stretch {
        losses: losses("tp2-dp2"),
        ..Stretch::default()
    };
    assert_goes_on(&resumed, &whole, FIRST, "the page");
    assert!(at("megatron/demo-back/iter_0000030/metadata.json").is_file());
}

/// A copy of a fixture in which one argument has another value.
fn with_argument(to: &Path, name: &str, argument: &str, value: Tree) {
    let from = fixture(name).join("iter_0000010");
    fs::create_dir(to).unwrap();
    for file in fs::read_dir(&from).unwrap() {
        let file = file.unwrap();
        symlink(file.path(), to.join(file.file_name())).unwrap();
    }
    let common = PtFile::open(from.join("common.pt")).unwrap();
    let entries = common.root().entries().unwrap();
    let mut copies = Vec::new();
    for (key, value) in entries.iter().filter(|(key, _)| is_plain(*key)) {
        let copy = |value| Tree::copy_of(value, 10_000).unwrap();
        copies.push((copy(key), copy(value)));
    }
    let args = copies
        .iter_mut()
        .find(|(key, _)| *key == Tree::from("args"));
    let Tree::Object {
        state: Some(state), ..
    } = &mut args.unwrap().1
    else {
        panic!("args are an object");
    };
    let Tree::Dict(state) = &mut **state else {
        panic!("its attributes are a dict");
    };
    state.retain(|(key, _)| *key != Tree::from(argument));
    state.push((argument.into(), value));
    fs::remove_file(to.join("common.pt")).unwrap();
    let file = File::create_new(to.join("common.pt")).unwrap();
    PtWriter::new(file, &Tree::Dict(copies))
        .unwrap()
        .finish()
        .unwrap();
}

/// The optimizer of the fixture `pp2` has a tensor, which a copy would lose.
fn is_plain(key: Value) -> bool {
    key.as_str().is_some()
}

#[rstest]
#[case("tp2-dp2", "multi_latent_attention", true.into(), "megaburn does not compute this")]
#[case("tp2-dp2", "mtp_num_layers", 1.into(), "multi-token prediction is not converted")]
#[case("tp2-dp2", "rotary_percent", 0.5.into(), "megaburn does not compute this")]
#[case("tp2-dp2", "normalization", "LayerNorm".into(), "RMSNorm, SwiGLU")]
#[case("tp2-dp2", "add_bias_linear", true.into(), "RMSNorm, SwiGLU")]
#[case("tp2-dp2", "position_embedding_type", "mrope".into(), "learned_absolute and rope")]
#[case("tp2-dp2", "optimizer", "sgd".into(), "adam with decoupled weight decay only")]
#[case("tp2-dp2", "fp16", true.into(), "use bf16")]
#[case("tp2-dp2", "reset_attention_mask", true.into(), "samples would not be the same")]
#[case("tp2-dp2", "hidden_size", "16".into(), "it must be a size")]
#[case("tp2-dp2", "rotary_base", Tree::None, "argument `rotary_base`")]
#[case("tp2-dp2", "train_iters", Tree::None, "the number of steps is unknown")]
#[case("tp2-dp2", "consumed_train_samples", 79.into(), "are further, at 80")]
#[case("tp2-dp2", "num_layers", 3.into(), "the arguments say [3, 16")]
#[case("tp2-dp2", "untie_embeddings_and_output_weights", false.into(), "output_layer.weight")]
#[case("dp2-ep2", "moe_router_pre_softmax", true.into(), "megaburn does not compute this")]
#[case("dp2-ep2", "moe_shared_expert_intermediate_size", 8.into(), "does not compute this")]
#[case("dp2-ep2", "moe_router_load_balancing_type", "other".into(), "megaburn does not have it")]
fn what_cannot_be_continued_is_refused_by_the_name_of_its_argument(
    #[case] name: &str,
    #[case] argument: &str,
    #[case] value: Tree,
    #[case] why: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let (from, run) = (dir.path().join("iter"), dir.path().join("run"));
    with_argument(&from, name, argument, value);
    let error = from_megatron(&from, &run, None).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(why), "{text}");
    let names_it = text.contains(&format!("`{argument}`")) || text.contains("tensor `");
    assert!(names_it, "{text}");
    assert!(!run.exists());
    assert_eq!(error.exit(), megaburn::train::Exit::BadInput);
}

#[test]
fn layers_of_transformer_engine_name_the_norm_before_experts_in_their_way() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let engine = Tree::from("transformer_engine");
    with_argument(&at("iter"), "dp2-ep2", "transformer_impl", engine);
    from_megatron(&at("iter"), &at("run"), None).unwrap();
    let folder = to_megatron(&at("run"), &at("back"), Some(1))
        .unwrap()
        .folder;
    let [old, new] = [&at("iter"), &folder].map(|folder| DcpDir::open(folder).unwrap());
    for state in ["", "optimizer.state.param.", "optimizer.state.exp_avg_sq."] {
        let name = |norm: &str| format!("{state}decoder.layers.{norm}");
        let (local, engine) = (
            name("mlp.linear_fc1.layer_norm_weight"),
            name("pre_mlp_layernorm.weight"),
        );
        assert!(new.tensor(&local).is_err());
        assert!(old.read(&local).unwrap() == new.read(&engine).unwrap());
    }
    // Without expert parallelism there is one optimizer.
    let common = PtFile::open(folder.join("common.pt")).unwrap();
    let optimizer = common.root().get("optimizer").unwrap();
    assert!(optimizer.get("param_state_sharding_type").is_some());
    // Its names and its one optimizer are read, too.
    let old = from_megatron(&at("iter"), &at("old"), None).unwrap();
    let new = from_megatron(&at("back"), &at("new"), None).unwrap();
    assert_eq!((new.model, new.progress), (old.model, old.progress));
}

#[test]
fn rows_of_the_vocabulary_are_dropped_and_added() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let imported = from_megatron(&fixture("tp2-dp2"), &at("run"), Some(265)).unwrap();
    assert_eq!(imported.model.vocab, 265);
    assert!(
        imported
            .notes
            .iter()
            .any(|note| note.starts_with("7 of 272 rows"))
    );
    let folder = to_megatron(&at("run"), &at("back"), None).unwrap().folder;
    let original = fixture("tp2-dp2").join("iter_0000010");
    let [old, new] = [&original, &folder].map(|folder| DcpDir::open(folder).unwrap());
    for name in [
        "output_layer.weight",
        "optimizer.state.exp_avg.embedding.word_embeddings.weight",
    ] {
        assert_eq!(new.tensor(name).unwrap().shape(), [272, 16]);
        let [old, new] = [&old, &new].map(|dir| dir.read(name).unwrap());
        let kept = 265 * 16 * 4;
        assert!(old[..kept] == new[..kept] && new[kept..].iter().all(|byte| *byte == 0));
    }
    let error = from_megatron(&fixture("tp2-dp2"), &at("other"), Some(273)).unwrap_err();
    assert!(
        error.to_string().contains("`--vocab-size` is 273"),
        "{error}"
    );
}

#[test]
fn what_is_not_there_or_in_the_way_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let buckets = root().join("tests/fixtures/megatron-checkpoints/dp2");
    let error = from_megatron(&buckets, &at("run"), None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("--dist-ckpt-optim-fully-reshardable"),
        "{error}"
    );
    from_megatron(&fixture("pp2"), &at("run"), None).unwrap();
    let error = from_megatron(&fixture("pp2"), &at("run"), None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("exists, so no run is written there"),
        "{error}"
    );
    fs::create_dir(at("out")).unwrap();
    let error = to_megatron(&at("run"), &at("out"), None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("exists, so no checkpoint is written there"),
        "{error}"
    );
    let error = to_megatron(&at("out"), &at("back"), None)
        .unwrap_err()
        .to_string();
    assert!(error.contains("contains neither"), "{error}");
    let names = fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(names, 2, "nothing unfinished remains");
}

#[test]
fn a_run_that_began_here_has_all_arguments_that_megatron_lm_needs() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    from_megatron(&fixture("tp2-dp2"), &at("run"), None).unwrap();
    // Without the original arguments, all that an import needs follows from the configuration.
    fs::remove_file(at("run/megatron-common.pt")).unwrap();
    to_megatron(&at("run"), &at("back"), None).unwrap();
    let old = from_megatron(&fixture("tp2-dp2"), &at("old"), Some(272)).unwrap();
    let new = from_megatron(&at("back"), &at("new"), Some(272)).unwrap();
    assert_eq!(json!(new.model), json!(old.model));
    assert_eq!(new.progress, old.progress);
    assert_eq!(new.config.optimizer, old.config.optimizer);
    let path = dir.path().join("back/iter_0000010");
    let embedding = DcpDir::open(path).unwrap();
    let embedding = embedding
        .tensor("embedding.word_embeddings.weight")
        .unwrap();
    assert_eq!(embedding.shape(), [384, 16], "a multiple of 128");
}
