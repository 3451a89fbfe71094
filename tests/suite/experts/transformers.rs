//! Models with experts, compared with Transformers under every expert grid.

use megaburn::{
    mesh::Layout,
    train::{config::Dtype, device::Devices},
    verify::{Reference, Tolerances, verify},
};
use rstest::rstest;

use crate::{
    models::round_trip::{assert_comes_back, assert_writes_what_transformers_does},
    models::transformers::fixture,
};

/// Each model with its number of experts.
pub(crate) const FIXTURES: [(&str, usize); 13] = [
    ("mixtral", 8),
    ("qwen3-moe", 8),
    ("qwen3-moe-plain", 6),
    ("deepseek-v2", 8),
    ("deepseek-v2-greedy", 6),
    ("deepseek-v3", 8),
    ("deepseek-v3-yarn", 8),
    ("olmoe", 6),
    ("olmoe-odd", 6),
    ("qwen2-moe", 6),
    ("qwen2-moe-odd", 6),
    ("gpt-oss", 4),
    ("gpt-oss-odd", 6),
];

const LAYOUTS: [&str; 24] = [
    "tp1",
    "dp2",
    "dp2-ep2",
    "dp4-ep2",
    "dp4-ep4",
    "dp8-ep8",
    "dp3-ep3",
    "dp2-etp2",
    "dp4-ep2-etp2",
    "tp2-sp",
    "tp2-ep2-sp",
    "tp2-etp2-sp",
    "tp2-dp2-ep2-sp",
    "tp2-dp2-ep4-sp",
    "tp2-dp2-ep2-etp2-sp",
    "tp4-ep4-sp",
    "cp2-ep2",
    "cp2-dp2-ep4",
    "tp2-cp2-ep4-sp",
    "tp2-cp2-dp2-ep4-etp2-sp",
    "pp2-ep1",
    "pp2-dp2-ep2",
    "tp2-pp2-ep2-sp",
    "cp2-pp2-dp2-ep4",
];

#[rstest]
fn a_model_with_experts_equals_transformers_under_every_grid(
    #[values(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)] index: usize,
) {
    let (name, experts) = FIXTURES[index];
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
        if let Some(error) = &report.error {
            let of_experts = !experts.is_multiple_of(layout.ep) && error.contains("experts");
            let of_samples = layout.dp == 3 && error.contains("batch of 8 samples");
            assert!(of_experts || of_samples, "{name}, {layout}: {error}");
            continue;
        }
        assert!(
            report.ok && report.skipped.is_empty(),
            "{name}, {layout}: {report:#?}"
        );
        assert!(report.train_losses_max_abs.is_some());
        compared += 1;
    }
    assert!(compared >= 14, "{name}: {compared} layouts");
}

/// If two experts score almost equally for a token, rounding to bf16 decides between them. A few
/// tokens then go elsewhere, which shows in the gradients of single experts and hardly in losses.
/// After steps the error is at most twice that of PyTorch's own bf16: 8.2e-3 with
/// `deepseek-v3-yarn` (`benches/peer/hf_bf16_error.py`).
#[rstest]
fn in_bf16_losses_are_those_of_transformers(
    #[values(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)] index: usize,
    #[values("tp1", "dp2-ep2", "tp2-ep2-sp", "pp2")] layout: &str,
) {
    let (name, _) = FIXTURES[index];
    let reference = Reference::open(&fixture(name)).unwrap();
    let layout = layout.parse().unwrap();
    let tolerances = Tolerances::of(Dtype::Bf16);
    let report = verify(
        &reference,
        &layout,
        Dtype::Bf16,
        &tolerances,
        Devices::Cpu,
        None,
    );
    assert_eq!(report.error, None);
    assert!(report.loss_abs.unwrap() <= tolerances.loss, "{report:?}");
    assert!(
        report.train_losses_max_abs.unwrap() <= 2.0 * 8.2e-3,
        "{report:?}"
    );
}

#[rstest]
fn a_model_with_experts_comes_back_byte_for_byte(
    #[values(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)] index: usize,
) {
    assert_comes_back(FIXTURES[index].0);
}

#[rstest]
fn text_of_experts_is_that_of_transformers(
    #[values(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)] index: usize,
) {
    let name = FIXTURES[index].0;
    assert_writes_what_transformers_does(name, ["tp1", "tp2-ep2-sp", "dp2-ep2", "pp2"]);
}
