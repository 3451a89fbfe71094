//! The default form of Megatron-LM's distributed optimizer, in checkpoints that it wrote.

use std::{io::Write, path::Path};

use megaburn::{
    checkpoint::{Checkpoint, compare},
    train::{
        Exit,
        megatron::{FromMegatronConfig, from_megatron, to_megatron},
    },
};
use megaburn_test_support::text::fresh_seed;
use megaburn_torch::{
    dcp::{DcpDir, DcpWriter},
    megatron::write_iteration,
    pickle::Tree,
    pt::PtFile,
};
use rstest::rstest;

use super::{FIRST, fixture, import, with_arguments};

/// The tensors of a run's checkpoint that differ from those of another.
pub(super) fn differences(a: &Path, b: &Path) -> Vec<String> {
    let checkpoint = |run: &Path| {
        let step = run.join(format!("checkpoints/step-{FIRST:08}"));
        Checkpoint::open(&step).unwrap()
    };
    let compared = compare(&checkpoint(a), &checkpoint(b), |_| ()).unwrap();
    assert!(compared.num_tensors > 3);
    let different = [
        compared.only_in_a.clone(),
        compared.only_in_b.clone(),
        compared.shapes_differ.clone(),
        compared.dtypes_differ.clone(),
        compared.values_differ.clone(),
    ]
    .concat();
    assert_eq!(compared.is_identical(), different.is_empty());
    different
}

#[rstest]
fn both_forms_give_the_same_run(
    #[values("tp2-dp2", "dp2-ep2", "tied-pp2-dp2", "engine-bf16-tp2-dp2")] name: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let by_parameter = import(&fixture(name), &at("a")).unwrap();
    let mut by_bucket = import(&fixture(&format!("{name}-buckets")), &at("b")).unwrap();
    assert_eq!(by_bucket.progress, by_parameter.progress);
    assert_eq!(by_bucket.model, by_parameter.model);
    assert_eq!(by_bucket.notes, by_parameter.notes);
    by_bucket.config.run.dir = by_parameter.config.run.dir.clone();
    assert_eq!(by_bucket.config.to_toml(), by_parameter.config.to_toml());
    let nothing: [String; 0] = [];
    assert_eq!(differences(&at("a"), &at("b")), nothing);

    // What is written from there is what Megatron-Core wrote by parameter.
    let folder = to_megatron(&at("b"), &at("back"), None).unwrap().folder;
    let original = fixture(name).join("iter_0000010");
    let [old, new] = [&original, &folder].map(|folder| DcpDir::open(folder).unwrap());
    assert_eq!(old.tensors().len(), new.tensors().len());
    for (tensor, _) in old.tensors() {
        assert!(
            old.read(tensor).unwrap() == new.read(tensor).unwrap(),
            "{tensor}"
        );
    }
}

/// The layers that the arguments name are tried first, and the values decide.
#[rstest]
#[case("tp2-dp2", "transformer_engine")]
#[case("dp2-ep2", "transformer_engine")]
#[case("tied-pp2-dp2", "transformer_engine")]
#[case("engine-bf16-tp2-dp2", "local")]
fn an_order_that_the_values_refute_gives_way_to_another(#[case] name: &str, #[case] layers: &str) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let arguments = [
        ("transformer_impl", layers.into()),
        ("moe_grouped_gemm", true.into()),
    ];
    with_arguments(&at("iter"), &format!("{name}-buckets"), &arguments);
    import(&at("iter"), &at("a")).unwrap();
    import(&fixture(name), &at("b")).unwrap();
    assert!(differences(&at("a"), &at("b")).is_empty());
}

/// A copy of a fixture that one rank wrote, in which `change` has changed the bytes of tensors; a
/// tensor without bytes is left out.
pub(super) fn with_tensors(to: &Path, name: &str, mut change: impl FnMut(&str, &mut Vec<u8>)) {
    let from = fixture(name).join("iter_0000010");
    let old = DcpDir::open(&from).unwrap();
    let mut writer = DcpWriter::create(to, 0).unwrap();
    for (name, of) in old.tensors() {
        let mut bytes = old.read(name).unwrap();
        change(name, &mut bytes);
        if bytes.is_empty() {
            continue;
        }
        let (shape, zeros) = (of.shape(), vec![0; of.shape().len()]);
        let write = |out: &mut dyn Write| out.write_all(&bytes);
        writer
            .tensor(name, of.dtype(), shape, &zeros, shape, write)
            .unwrap();
    }
    for name in old.objects() {
        let value = Tree::copy_of(old.object(name).unwrap().root(), 10_000).unwrap();
        writer.object(name, &value, &[]).unwrap();
    }
    let common = PtFile::open(from.join("common.pt")).unwrap();
    let common = Tree::copy_of(common.root(), 100_000).unwrap();
    write_iteration(to, &[writer.finish().unwrap()], &common, &[]).unwrap();
}

/// A case is a part of the names of the tensors of a buffer, the number of a bucket, a range of its
/// elements, and the name of the parameter that they are.
#[rstest]
// Norm of the last layer before the MLP, on the second rank of tensor parallelism.
#[case("tp2-dp2", "dp_group_idx_1.gbuf_idx_0", 0, 2816..2832, "mlp.linear_fc1.layer_norm_weight")]
// The first parameter of the second bucket.
#[case("tp2-dp2", "dp_group_idx_0.gbuf_idx_0", 1, 0..128, "linear_proj.weight")]
// The last expert of the second rank.
#[case("dp2-ep2", "chained_1.optimizer.distributed.dp_group_idx_1", 0, 0..192, "experts.linear_fc2")]
// The copy of the tied embedding in the last stage.
#[case("tied-pp2-dp2", "dp_group_idx_1.gbuf_idx_0", 0, 0..768, "embedding.word_embeddings.weight")]
#[case("tied-pp2-dp2", "dp_group_idx_0.gbuf_idx_0", 0, 2304..2816, "position_embeddings.weight")]
#[case("engine-bf16-tp2-dp2", "dp_group_idx_1.gbuf_idx_0", 1, 1216..1600, "word_embeddings.weight")]
fn a_changed_weight_is_refused_by_name(
    #[case] name: &str,
    #[case] buffer: &str,
    #[case] bucket: usize,
    #[case] range: std::ops::Range<usize>,
    #[case] parameter: &str,
) {
    let mut random = fastrand::Rng::with_seed(fresh_seed());
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    // The largest bit of the mantissa of any value, the first and the last ones too.
    let element = match random.usize(0..3) {
        0 => range.start,
        1 => range.end - 1,
        _ => random.usize(range),
    };
    println!("element {element}");
    let mut num_changed = 0;
    with_tensors(&at("iter"), &format!("{name}-buckets"), |name, bytes| {
        let ending = format!(".bucket_idx_{bucket}.param");
        if name.contains(buffer) && name.ends_with(&ending) {
            bytes[element * 4 + 2] ^= 0x40;
            num_changed += 1;
        }
    });
    assert_eq!(num_changed, 1);
    let error = import(&at("iter"), &at("run")).unwrap_err();
    let text = error.to_string();
    for part in [
        parameter,
        "is not what the f32 weights of the optimizer say",
        "--dist-ckpt-optim-fully-reshardable",
        "--weights-only",
    ] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(error.exit(), Exit::BadInput);
    assert!(!at("run").exists());
    let options = FromMegatronConfig::new().with_weights_only(true);
    from_megatron(&at("iter"), &at("run"), &options).unwrap();
}

/// Values between parameters and behind the last one have no meaning.
#[rstest]
fn the_padding_may_have_any_values(#[values("tp2-dp2", "engine-bf16-tp2-dp2")] name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    with_tensors(&at("iter"), &format!("{name}-buckets"), |name, bytes| {
        // Behind a norm of 16 elements.
        if name.contains("dp_group_idx_0") && name.contains("bucket_idx_1") {
            let norm = if bytes.len() == 4 * 3456 { 1216 } else { 1024 };
            bytes[(norm + 16) * 4..(norm + 64) * 4].fill(0xff);
        }
    });
    import(&at("iter"), &at("a")).unwrap();
    import(&fixture(name), &at("b")).unwrap();
    assert!(differences(&at("a"), &at("b")).is_empty());
}

#[rstest]
// The output projections of both layers.
#[case("tp2-dp2", 1, 0, 1, 1088, 128, "linear_proj.weight")]
// The second matrices of both experts of a rank.
#[case("dp2-ep2", 0, 0, 0, 576, 192, "linear_fc2.weight")]
fn parameters_in_another_place_are_refused(
    #[case] name: &str,
    #[case] one_bucket: usize,
    #[case] one: usize,
    #[case] other_bucket: usize,
    #[case] other: usize,
    #[case] len: usize,
    #[case] parameter: &str,
) {
    let buckets = format!("{name}-buckets");
    let prefix = if name == "dp2-ep2" { "chained_1." } else { "" };
    let key = |bucket: usize, state: &str| {
        format!(
            "{prefix}optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, \
            torch.float32).bucket_idx_{bucket}.{state}"
        )
    };
    let old = DcpDir::open(fixture(&buckets).join("iter_0000010")).unwrap();
    let read = |bucket: usize, state: &str, start: usize| {
        let name = key(bucket, state);
        old.read_region(&name, &[start], &[len]).unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    with_tensors(&at("iter"), &buckets, |name, bytes| {
        for state in ["param", "exp_avg", "exp_avg_sq"] {
            for (to, start, values) in [
                (one_bucket, one, read(other_bucket, state, other)),
                (other_bucket, other, read(one_bucket, state, one)),
            ] {
                if name == key(to, state) {
                    bytes[start * 4..(start + len) * 4].copy_from_slice(&values);
                }
            }
        }
    });
    let text = import(&at("iter"), &at("run")).unwrap_err().to_string();
    assert!(
        text.contains(parameter) && text.contains("--weights-only"),
        "{text}"
    );
    assert!(!at("run").exists());
}

#[rstest]
#[case(
    "tp2-dp2",
    "tensor_model_parallel_size",
    1,
    "the arguments say [1, 1] ranks"
)]
#[case("tp2-dp2", "pipeline_model_parallel_size", 1 << 40, "the arguments say [2, 1099511627776]")]
#[case("tp2-dp2", "expert_model_parallel_size", 7, "")]
#[case("dp2-ep2", "expert_model_parallel_size", 1 << 40, "ranks of model parallelism")]
#[case(
    "dp2-ep2",
    "expert_model_parallel_size",
    1,
    "the arguments say [1, 1] ranks"
)]
#[case(
    "dp2-ep2",
    "expert_tensor_parallel_size",
    2,
    "the arguments say [2, 2, 1] ranks"
)]
fn ranks_that_the_buckets_do_not_have_are_refused(
    #[case] name: &str,
    #[case] argument: &str,
    #[case] degree: i64,
    #[case] expected: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let arguments = [(argument, degree.into())];
    with_arguments(&at("iter"), &format!("{name}-buckets"), &arguments);
    match import(&at("iter"), &at("run")) {
        // A model without experts has no use of it.
        Ok(_) => assert_eq!(expected, ""),
        Err(error) => {
            let text = error.to_string();
            assert!(!expected.is_empty() && text.contains(expected), "{text}");
        }
    }
}

#[rstest]
#[case(".exp_avg", "lacks one of")]
#[case("dp_group_idx_1.gbuf_idx_0", "the arguments say [2, 1] ranks")]
#[case("bucket_idx_0.", "is missing")]
#[case("bucket_idx_1.", "are not filled by the parameters of layers")]
fn buckets_that_are_not_all_there_are_refused(#[case] absent: &str, #[case] expected: &str) {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    with_tensors(&at("iter"), "tp2-dp2-buckets", |name, bytes| {
        let is_absent = name.ends_with(absent) || (absent != ".exp_avg" && name.contains(absent));
        if is_absent && name.starts_with("optimizer.") {
            bytes.clear();
        }
    });
    let text = import(&at("iter"), &at("run")).unwrap_err().to_string();
    assert!(text.contains(expected), "{text}");
    assert!(!at("run").exists());
}
