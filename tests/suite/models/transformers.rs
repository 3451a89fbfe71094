//! Compares tiny models with Hugging Face Transformers, under every layout.

use std::path::{Path, PathBuf};

use megaburn::{
    mesh::Layout,
    train::{
        config::{CpComm, Dtype},
        device::Devices,
    },
    verify::{Reference, Tolerances, verify},
};
use rstest::rstest;

use crate::runs::child::Ranks;

/// The folder of a Transformers model with its reference outputs.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name)
}

/// Each model with the largest degree of tensor parallelism that its heads allow.
pub(crate) const FIXTURES: [(&str, usize); 43] = [
    ("gpt2", 8),
    ("gpt2-untied", 2),
    ("llama", 8),
    ("llama-biases", 4),
    ("llama-linear", 4),
    ("llama-one-group", 8),
    ("llama3-ramp", 4),
    ("llama3-scaled", 8),
    ("mistral", 8),
    ("mistral-full", 4),
    ("qwen2", 8),
    ("qwen2-windows", 2),
    ("qwen3", 8),
    ("qwen3-tied", 4),
    ("gemma2", 4),
    ("gemma2-odd", 2),
    ("gemma3", 4),
    ("gemma3-scaled", 2),
    ("granite", 4),
    ("granite-tied", 2),
    ("nemotron", 4),
    ("nemotron-biases", 2),
    ("olmo2", 4),
    ("olmo2-odd", 2),
    ("phi3", 4),
    ("phi3-partial", 2),
    ("starcoder2", 4),
    ("starcoder2-plain", 2),
    ("gpt-neox", 4),
    ("gpt-neox-serial", 2),
    ("falcon", 4),
    ("falcon-grouped", 2),
    ("falcon-alibi", 2),
    ("falcon-alibi-grouped", 4),
    ("phi3-long", 4),
    ("phi3-short", 4),
    ("llama-dynamic", 4),
    ("t5", 8),
    ("t5-relu", 4),
    ("mt5", 2),
    ("bert", 4),
    ("bert-masked", 2),
    ("megatron-bert", 4),
];

/// The first of them, which are decoders.
const NUM_DECODERS: usize = 37;
/// The first of them, which generate text.
const NUM_GENERATING: usize = 40;

// The macros below list every index.
const _: () = assert!(FIXTURES.len() == 43 && NUM_DECODERS == 37 && NUM_GENERATING == 40);

/// Makes a test of the models of [`FIXTURES`] with these indices, whose name and largest degree the
/// body uses.
macro_rules! each_at {
    ([$($index:literal),*] fn $test:ident($name:ident, $most:pat) $body:block) => {
        #[rstest]
        fn $test(#[values($($index),*)] index: usize) {
            let ($name, $most) = $crate::models::transformers::FIXTURES[index];
            $body
        }
    };
}
pub(crate) use each_at;

/// Makes a test of each model of [`FIXTURES`], as [`each_at`] does.
macro_rules! each_fixture {
    ($($test:tt)*) => {
        $crate::models::transformers::each_at! {
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,
            24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42]
            $($test)*
        }
    };
}
pub(crate) use each_fixture;

/// As [`each_fixture`], for decoders.
macro_rules! each_decoder {
    ($($test:tt)*) => {
        $crate::models::transformers::each_at! {
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,
            24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36]
            $($test)*
        }
    };
}

/// As [`each_fixture`], for models that generate text.
macro_rules! each_generating {
    ($($test:tt)*) => {
        $crate::models::transformers::each_at! {
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23,
            24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39]
            $($test)*
        }
    };
}
pub(crate) use each_generating;

const LAYOUTS: [&str; 17] = [
    "tp1",
    "dp2",
    "tp2",
    "tp2-sp",
    "tp2-dp2",
    "tp2-dp2-sp",
    "tp4",
    "tp4-sp",
    "tp4-dp2",
    "tp4-dp2-sp",
    "tp8",
    "tp8-sp",
    "dp4",
    "pp2",
    "pp2-dp2",
    "tp2-pp2-sp",
    "tp2-pp2-dp2-sp",
];

each_fixture! {
    fn a_model_equals_transformers_under_every_layout(name, most) {
        let reference = Reference::open(&fixture(name)).unwrap();
        let mut compared = 0;
        for layout in LAYOUTS.map(|text| text.parse::<Layout>().unwrap()) {
            let tolerances = Tolerances::of(Dtype::F32);
            let report = verify(
                &reference,
                &layout,
                Dtype::F32,
                &tolerances,
                Devices::Cpu,
                None,
            );
            // Samples and the sequence may not divide either; then the error contains all numbers.
            if let Some(error) = &report.error {
                let of_heads = layout.tp > most && error.contains("heads");
                let of_samples = layout.dp > 2 && error.contains("batch of 2 samples");
                let of_sequence = layout.sp && error.contains("sequence length");
                assert!(
                    of_heads || of_samples || of_sequence,
                    "{name}, {layout}: {error}"
                );
                continue;
            }
            assert!(
                report.ok && report.skipped.is_empty(),
                "{name}: {report:#?}"
            );
            assert!(report.train_losses_max_abs.is_some() && layout.tp <= most);
            compared += 1;
        }
        let least = if most == 8 { 15 } else { 9 };
        assert!(compared >= least, "{name}: {compared} layouts");
    }
}

/// Layouts with context parallelism, and how keys and values are exchanged.
const CONTEXTS: [(&str, &str); 14] = [
    ("cp2", "p2p"),
    ("cp2", "all_gather"),
    ("cp2", "a2a"),
    ("cp3", "p2p"),
    ("cp4", "p2p"),
    ("cp4", "all_gather"),
    ("cp4", "a2a2+p2p"),
    ("tp2-cp2-sp", "p2p"),
    ("tp2-cp2", "a2a"),
    ("cp2-pp2", "all_gather"),
    ("cp2-dp2", "auto"),
    ("tp2-cp2-pp2-sp", "p2p"),
    ("cp8", "p2p"),
    ("cp11", "p2p"),
];

each_decoder! {
    fn a_model_equals_transformers_where_ranks_share_sequences(name, most) {
        let mut compared = 0;
        for (layout, comm) in CONTEXTS {
            let comm = CpComm::try_from(comm.to_string()).unwrap();
            let reference = Reference::open(&fixture(name)).unwrap().with_cp_comm(comm);
            let layout = layout.parse().unwrap();
            let tolerances = Tolerances::of(Dtype::F32);
            let report = verify(
                &reference,
                &layout,
                Dtype::F32,
                &tolerances,
                Devices::Cpu,
                None,
            );
            if let Some(error) = &report.error {
                let of_length = error.contains("sequence length");
                assert!(
                    of_length || error.contains("heads"),
                    "{name}, {layout}: {error}"
                );
                continue;
            }
            assert!(
                report.ok && report.skipped.is_empty(),
                "{name}, {comm:?}: {report:#?}"
            );
            compared += 1;
        }
        // 30 tokens only divide into the 6 chunks of cp3, and 22 tokens only into the 22 chunks of cp11.
        let least = match name {
            "gpt2-untied" | "qwen3-tied" => 1,
            name if most == 2 && name != "qwen2-windows" => 1,
            _ => 4,
        };
        assert!(compared >= least, "{name}: {compared} layouts");
    }
}

/// Rows of an encoder are padded, so its sequences are not split over ranks.
#[test]
fn an_encoder_refuses_ranks_that_share_sequences() {
    let reference = Reference::open(&fixture("bert")).unwrap();
    let tolerances = Tolerances::of(Dtype::F32);
    let layout = "cp2".parse().unwrap();
    let report = verify(
        &reference,
        &layout,
        Dtype::F32,
        &tolerances,
        Devices::Cpu,
        None,
    );
    let error = report.error.unwrap();
    assert!(
        error.contains("context parallelism (cp2) does not support `bidirectional`"),
        "{error}"
    );
}

#[test]
fn processes_compare_as_threads_do() {
    let qwen3 = fixture("qwen3");
    let args = [
        "verify",
        qwen3.to_str().unwrap(),
        "--layout",
        "tp2-sp",
        "--json",
    ];
    let threads = Ranks::command(&args).finish();
    let processes = Ranks::commands(2, &args).finish();
    assert!(threads[0].stdout.contains("\"ok\":true"), "{threads:?}");
    assert_eq!(processes[0].stdout, threads[0].stdout);
    assert_eq!(processes[1].stdout, "", "the first rank alone prints");
    let args = [
        "verify",
        qwen3.to_str().unwrap(),
        "--layout",
        "cp2",
        "--cp-comm",
        "p2p",
        "--json",
    ];
    let threads = Ranks::command(&args).finish();
    let processes = Ranks::commands(2, &args).finish();
    assert!(threads[0].stdout.contains("\"ok\":true"), "{threads:?}");
    assert_eq!(processes[0].stdout, threads[0].stdout);
}
