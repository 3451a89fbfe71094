//! Runs of Megatron-LM continue here, and back there.

use std::{fs, os::unix::fs::symlink};

use megaburn::{
    report::metrics::{MetricsRecord, read_metrics},
    train::megatron::{FromMegatronConfig, from_megatron, to_megatron},
};
use megaburn_torch::{dcp::DcpDir, pickle::Tree, pt::PtFile};
use rstest::rstest;

use super::{FIRST, MIDDLE, config, copied, fixture, import, root, with_arguments};
use crate::{
    house::docs::blocks,
    runs::{
        child::Ranks,
        resume::{Stretch, assert_goes_on, train},
    },
};

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
    let imported = import(&fixture(name), &run).unwrap();
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

/// The attributes of an object.
fn attributes(object: &Tree) -> Vec<(Tree, Tree)> {
    match object {
        Tree::Object {
            state: Some(state), ..
        } => match &**state {
            Tree::Dict(entries) => entries.clone(),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

#[rstest]
fn what_is_moved_here_and_back_is_the_same_to_the_bit(
    #[values("tp2-dp2", "pp2", "dp2-ep2")] name: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    import(&fixture(name).join("iter_0000010"), &run).unwrap();
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
        keys.push("optimizer");
    }
    for key in keys {
        assert_eq!(copied(&old, key), copied(&new, key), "{key}");
    }
    // Arguments that the fixtures do not have, as Megatron-LM does, are set at the end.
    let [old, new] = [old, new].map(|file| attributes(&copied(&file, "args")));
    let added = new.iter().skip(old.len());
    let added: Vec<_> = added
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    if has_masters {
        assert_eq!(old, new[..old.len()]);
    }
    let of_experts = [
        "moe_pad_expert_input_to_capacity",
        "moe_router_force_load_balancing",
    ];
    let expected = of_experts.map(|name| (Tree::from(name), Tree::from(false)));
    let expected = if name == "dp2-ep2" {
        &expected[..]
    } else {
        &[]
    };
    assert_eq!(added, expected);
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

#[test]
fn layers_of_transformer_engine_name_the_norm_before_experts_in_their_way() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let engine = Tree::from("transformer_engine");
    with_arguments(&at("iter"), "dp2-ep2", &[("transformer_impl", engine)]);
    import(&at("iter"), &at("run")).unwrap();
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
    let old = import(&at("iter"), &at("old")).unwrap();
    let new = import(&at("back"), &at("new")).unwrap();
    assert_eq!((new.model, new.progress), (old.model, old.progress));
}

#[test]
fn rows_of_the_vocabulary_are_dropped_and_added() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let imported = from_megatron(
        &fixture("tp2-dp2"),
        &at("run"),
        &FromMegatronConfig::new().with_vocab_size(Some(265)),
    )
    .unwrap();
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
    let error = from_megatron(
        &fixture("tp2-dp2"),
        &at("other"),
        &FromMegatronConfig::new().with_vocab_size(Some(273)),
    )
    .unwrap_err();
    assert!(
        error.to_string().contains("`--vocab-size` is 273"),
        "{error}"
    );
}
