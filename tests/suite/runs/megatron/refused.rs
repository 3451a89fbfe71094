//! Checkpoints of Megatron-LM that are refused.

use std::{fs, io::Write, path::Path};

use megaburn::train::{
    Exit,
    megatron::{FromMegatronConfig, from_megatron, to_megatron},
};
use megaburn_torch::{
    dcp::{DcpDir, DcpWriter},
    megatron::write_iteration,
    pickle::Tree,
    pt::PtFile,
};
use rstest::rstest;

use super::{FIRST, changed, config, fixture, import, inner, set, with_arguments, write_changed};
use crate::runs::resume::train;

#[rstest]
#[case("tp2-dp2", "multi_latent_attention", true.into(), "megaburn has no layer that computes this")]
#[case("tp2-dp2", "mtp_num_layers", 1.into(), "multi-token prediction is not converted")]
#[case("tp2-dp2", "rotary_percent", 0.5.into(), "megaburn has no layer that computes this")]
#[case("tp2-dp2", "normalization", "LayerNorm".into(), "RMSNorm, SwiGLU")]
#[case("tp2-dp2", "add_bias_linear", true.into(), "RMSNorm, SwiGLU")]
#[case("tp2-dp2", "position_embedding_type", "mrope".into(), "learned_absolute and rope")]
#[case("tp2-dp2", "optimizer", "sgd".into(), "adam with decoupled weight decay only")]
#[case("tp2-dp2", "fp16", true.into(), "use bf16")]
#[case("tp2-dp2", "fp8", "e5m2".into(), "megaburn has `hybrid` and `e4m3`")]
#[case("tp2-dp2", "fp4", "e3m0".into(), "megaburn has `e2m1`")]
#[case("tp2-dp2", "reset_attention_mask", true.into(), "samples would not be the same")]
#[case("tp2-dp2", "hidden_size", "16".into(), "it must be a size")]
#[case("tp2-dp2", "rotary_base", Tree::None, "argument `rotary_base`")]
#[case("tp2-dp2", "train_iters", Tree::None, "is unknown: it has neither")]
#[case("tp2-dp2", "consumed_train_samples", 79.into(), "are further, at 80")]
#[case("tp2-dp2", "num_layers", 3.into(), "the arguments say [3, 16")]
#[case("tp2-dp2", "untie_embeddings_and_output_weights", false.into(), "output_layer.weight")]
#[case("dp2-ep2", "moe_router_pre_softmax", true.into(), "megaburn has no layer that computes this")]
#[case("dp2-ep2", "moe_shared_expert_intermediate_size", 8.into(), "has no layer that computes this")]
#[case("dp2-ep2", "moe_router_load_balancing_type", "other".into(), "megaburn does not have it")]
fn what_cannot_be_continued_is_refused_by_the_name_of_its_argument(
    #[case] name: &str,
    #[case] argument: &str,
    #[case] value: Tree,
    #[case] why: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let (from, run) = (dir.path().join("iter"), dir.path().join("run"));
    with_arguments(&from, name, &[(argument, value)]);
    let error = import(&from, &run).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(why), "{text}");
    let names_it = text.contains(&format!("`{argument}`")) || text.contains("tensor `");
    assert!(names_it, "{text}");
    assert!(!run.exists());
    assert_eq!(error.exit(), Exit::BadInput);
}

#[test]
fn what_is_not_there_or_in_the_way_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    import(&fixture("pp2"), &at("run")).unwrap();
    let error = import(&fixture("pp2"), &at("run")).unwrap_err().to_string();
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

/// Why the import of a fixture with another value of an argument is refused.
fn refusal(name: &str, argument: &str, value: &Tree) -> String {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    with_arguments(&at("iter"), name, &[(argument, value.clone())]);
    let imported = import(&at("iter"), &at("run"));
    let error = imported.expect_err(&format!("{name} {argument} {value:?}"));
    assert!(!at("run").exists());
    error.to_string()
}

#[test]
fn every_argument_that_changes_the_result_is_refused() {
    let of_models: [(&str, &str, Tree); 3] = [
        (
            "tp2-dp2",
            "multi_latent_attention rotary_interleaved apply_residual_connection_post_layernorm \
            squared_relu quick_geglu openai_gelu apply_layernorm_1p layernorm_zero_centered_gamma \
            qk_clip qk_l2_norm attention_output_gate use_mup is_hybrid_model enable_mhc_connections \
            heterogeneous_block_specs reset_position_ids reset_attention_mask fim_data sft fp16 \
            apply_wd_to_qk_layernorm use_precision_aware_optimizer",
            true.into(),
        ),
        (
            "tp2-dp2",
            "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json \
            experimental_attention_variant linear_attention_freq hybrid_override_pattern \
            hybrid_layer_pattern window_size no_rope_freq mrope_section softmax_scale \
            activation_func_clamp_value rotary_seq_len_interpolation_factor mtp_num_layers \
            glu_linear_offset no_weight_decay_cond_type step_batch_size_schedule",
            2.into(),
        ),
        (
            "dp2-ep2",
            "moe_router_pre_softmax moe_router_enable_expert_bias moe_shared_expert_gate \
            moe_apply_probs_on_input",
            true.into(),
        ),
    ];
    let experts = "moe_shared_expert_intermediate_size moe_latent_size moe_router_num_groups \
        moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_input_jitter_eps \
        moe_expert_rank_capacity_factor moe_mlp_glu_interleave_size moe_router_force_biased \
        moe_layer_freq";
    let mut cases = vec![
        ("tp2-dp2", "softmax_type", "learned".into()),
        ("tp2-dp2", "dataloader_type", "cyclic".into()),
        ("tp2-dp2", "decoupled_weight_decay", false.into()),
        ("tp2-dp2", "swiglu", false.into()),
        ("tp2-dp2", "global_batch_size", 0.into()),
        (
            "tp2-dp2",
            "spec",
            Tree::List(vec!["a.module".into(), "layers".into()]),
        ),
        ("dp2-ep2", "moe_router_score_function", "sigmoid".into()),
        (
            "dp2-ep2",
            "moe_layer_freq",
            Tree::List(vec![0.into(), 1.into()]),
        ),
        ("dp2-ep2", "add_qkv_bias", true.into()),
        ("pp2", "normalization", "RMSNorm".into()),
        ("pp2", "swiglu", true.into()),
        ("pp2", "qk_layernorm", true.into()),
        ("pp2", "group_query_attention", true.into()),
        ("pp2", "num_experts", 4.into()),
        ("pp2", "add_bias_linear", false.into()),
        ("pp2", "bias_gelu_fusion", false.into()),
        ("pp2", "max_position_embeddings", 64.into()),
    ];
    for (name, arguments, value) in of_models
        .into_iter()
        .chain([("dp2-ep2", experts, 2.into())])
    {
        cases.extend(
            arguments
                .split(' ')
                .map(|argument| (name, argument, value.clone())),
        );
    }
    for (name, argument, value) in cases {
        let text = refusal(name, argument, &value);
        let expected = format!("the argument `{argument}` in `");
        assert!(text.starts_with(&expected), "{argument}: {text}");
    }
    // What these say is what megaburn does.
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let local = Tree::List(vec!["local".into()]);
    with_arguments(&at("iter"), "tp2-dp2", &[("spec", local)]);
    import(&at("iter"), &at("run")).unwrap();
}

#[test]
fn a_weight_decay_that_changes_under_a_batch_ramp_is_refused() {
    let ramp = Tree::List(["4", "4", "16"].map(Tree::from).to_vec());
    let text = refusal("pp2", "rampup_batch_size", &ramp);
    assert!(
        text.contains("weight decay changes from 0.1 to 0.2"),
        "{text}"
    );
}

#[rstest]
#[case(Tree::call(Tree::global("os", "system"), vec!["exit 1".into()]), "os.system")]
#[case(Tree::List(vec![Tree::global("builtins", "eval")]), "builtins.eval")]
#[case(Tree::call(Tree::global("megatron.core.utils", "load"), vec![]), "megatron.core.utils.load")]
#[case(
    Tree::global("megatron.core.enums", "enum.sys.exit"),
    "megatron.core.enums.enum.sys.exit"
)]
fn what_a_pickle_would_call_is_neither_called_nor_copied(
    #[case] payload: Tree,
    #[case] named: &str,
    #[values("args", "opt_param_scheduler", "content_metadata")] place: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let hide = |common: &mut Vec<_>| set(inner(common, place), "harmless", payload.clone());
    changed(&at("iter"), "tp2-dp2", hide);
    let error = import(&at("iter"), &at("run")).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("iter/common.pt") && text.contains(&format!("`{named}`")),
        "{text}"
    );
    assert_eq!(error.exit(), Exit::BadInput);
    assert!(!at("run").exists());
    // Someone may put it into the run later.
    import(&fixture("tp2-dp2"), &at("run")).unwrap();
    fs::remove_file(at("run/megatron-common.pt")).unwrap();
    write_changed(&at("run/megatron-common.pt"), "tp2-dp2", hide);
    let error = to_megatron(&at("run"), &at("back"), None).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("run/megatron-common.pt"), "{text}");
    assert!(text.contains(&format!("`{named}`")), "{text}");
    assert!(!at("back").exists());
}

/// The run was changed after its import.
#[rstest]
#[case("optimizer.groups=[{match=\"norm.*\",lr=1e-3}]", "optimizer.groups")]
#[case("train.z_loss=1e-4", "train.z_loss")]
#[case("train.label_smoothing=0.1", "train.label_smoothing")]
fn a_run_with_options_that_megatron_lm_lacks_is_not_exported(
    #[case] set: &str,
    #[case] named: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    import(&fixture("tp2-dp2"), &at("run")).unwrap();
    train(config(&at("run"), "tp2", &[set]), FIRST + 1, FIRST + 1);
    let error = to_megatron(&at("run"), &at("back"), None).unwrap_err();
    assert!(error.to_string().contains(named), "{error}");
    assert!(!at("back").exists());
}

#[test]
fn classes_that_megatron_lm_has_in_its_arguments_are_copied() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let signal = Tree::call(Tree::global("signal", "Signals"), vec![15.into()]);
    let backend = Tree::global("megatron.core.transformer.enums", "AttnBackend");
    let backend = Tree::call(backend, vec![5.into()]);
    let arguments = [("exit_signal", signal), ("attention_backend", backend)];
    with_arguments(&at("iter"), "tp2-dp2", &arguments);
    import(&at("iter"), &at("run")).unwrap();
    let folder = to_megatron(&at("run"), &at("back"), None).unwrap().folder;
    let common = PtFile::open(folder.join("common.pt")).unwrap();
    let args = common.root().get("args").unwrap();
    for (name, value) in &arguments {
        let found = Tree::copy_of(args.attribute(name).unwrap(), 100);
        assert_eq!(found.as_ref(), Some(value));
    }
}

#[test]
fn sizes_that_no_tensor_has_are_errors() {
    for name in [
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "padded_vocab_size",
        "num_experts",
        "moe_ffn_hidden_size",
        "seq_length",
        "global_batch_size",
        "micro_batch_size",
        "train_iters",
        "tensor_model_parallel_size",
        "lr_wsd_decay_iters",
        "consumed_train_samples",
    ] {
        for size in [0, 1 << 40, i64::MAX] {
            let dir = tempfile::tempdir().unwrap();
            let at = |name: &str| dir.path().join(name);
            with_arguments(&at("iter"), "dp2-ep2", &[(name, size.into())]);
            let imported = import(&at("iter"), &at("run"));
            // Some of these describe a run that is possible.
            let is_free = [
                "train_iters",
                "tensor_model_parallel_size",
                "seq_length",
                "lr_wsd_decay_iters",
                "consumed_train_samples",
            ];
            let is_refused = imported.is_err();
            assert!(is_refused || is_free.contains(&name), "{name} {size}");
            assert!(is_refused || size < i64::MAX, "{name} {size}");
        }
    }
    let huge: Tree = (1i64 << 40).into();
    let text = refusal("dp2-ep2", "num_layers", &huge);
    assert!(
        text.contains("no tensor of the checkpoint has more than 272"),
        "{text}"
    );
}

/// A copy of a fixture that one rank wrote, in which a tensor has lost its last rows.
fn with_fewer_rows(to: &Path, name: &str, tensor: &str, rows: usize) {
    let old = DcpDir::open(fixture(name).join("iter_0000010")).unwrap();
    let mut writer = DcpWriter::create(to, 0).unwrap();
    for (name, of) in old.tensors() {
        let mut shape = of.shape().to_vec();
        let mut bytes = old.read(name).unwrap();
        if name == tensor {
            bytes.truncate(bytes.len() / shape[0] * rows);
            shape[0] = rows;
        }
        let write = |out: &mut dyn Write| out.write_all(&bytes);
        let zeros = vec![0; shape.len()];
        writer
            .tensor(name, of.dtype(), &shape, &zeros, &shape, write)
            .unwrap();
    }
    let common = PtFile::open(fixture(name).join("iter_0000010/common.pt")).unwrap();
    let common = Tree::copy_of(common.root(), 100_000).unwrap();
    write_iteration(to, &[writer.finish().unwrap()], &common, &[]).unwrap();
}

#[rstest]
#[case("embedding.word_embeddings.weight")]
#[case("output_layer.weight")]
#[case("optimizer.state.exp_avg.output_layer.weight")]
#[case("optimizer.state.param.embedding.word_embeddings.weight")]
fn a_tensor_with_other_rows_than_the_vocabulary_is_refused(#[case] tensor: &str) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    with_fewer_rows(&at("iter"), "tp2-dp2", tensor, 200);
    for vocab in [None, Some(150)] {
        let error = from_megatron(
            &at("iter"),
            &at("run"),
            &FromMegatronConfig::new().with_vocab_size(vocab),
        )
        .unwrap_err()
        .to_string();
        assert!(error.contains(&format!("`{tensor}`")), "{error}");
        assert!(
            error.contains("[200, 16]") && error.contains("[272, 16]"),
            "{error}"
        );
    }
}
