//! Hugging Face models in bf16: compared with Transformers in f32, used to start a run, and
//! exported.

use megaburn::{
    mesh::Layout,
    train::{config::Dtype, device::Devices},
    verify::{Reference, Tolerances, verify},
};
use rstest::rstest;
use serde_json::Value;

use megaburn_test_support::bf16::twice_pytorchs_error;

use crate::{
    models::round_trip::{Started, megaburn, succeed, text},
    models::transformers::{each_fixture, fixture},
};

each_fixture! {
    fn a_model_in_bf16_is_as_near_to_transformers_as_pytorchs_bf16(name, _) {
        let reference = Reference::open(&fixture(name)).unwrap();
        let tolerances = match twice_pytorchs_error(name) {
            Some([logits, loss, grad, train]) => Tolerances {
                logits,
                loss,
                grad,
                train,
            },
            None => Tolerances::of(Dtype::Bf16),
        };
        for layout in ["tp1", "tp2-sp", "dp2"].map(|text| text.parse::<Layout>().unwrap()) {
            let report = verify(
                &reference,
                &layout,
                Dtype::Bf16,
                &tolerances,
                Devices::Cpu,
                None,
            );
            assert!(
                report.ok && report.skipped.is_empty(),
                "{name}: {report:#?}"
            );
            assert!(
                report.logits_max_abs.unwrap() > 1e-3,
                "it is no bf16: {report:#?}"
            );
        }
    }
}

#[test]
fn the_command_line_verifies_in_bf16_with_tolerances_of_its_own() {
    let llama = fixture("llama");
    let line = |args: &[&str]| {
        let ended = megaburn(&[&["verify", text(&llama), "--json"], args].concat());
        let report: Value = serde_json::from_str(ended.stdout.trim()).unwrap();
        (ended.code, report)
    };
    let (code, report) = line(&["--dtype", "bf16", "--layout", "tp2"]);
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(
        line(&["--dtype", "bf16", "--tol-logits", "1e-4"]).0,
        Some(1)
    );
    assert_eq!(line(&["--dtype", "f32"]).0, Some(0));
}

#[test]
fn a_bf16_run_starts_from_a_model_resumes_is_asked_and_exported() {
    let hf = fixture("qwen3-tied");
    let dir = tempfile::tempdir().unwrap();
    let [narrow, half, back, back_half, again] =
        ["narrow", "half", "back", "back-half", "again"].map(|name| dir.path().join(name));
    succeed(&[
        "convert",
        "import",
        text(&hf),
        text(&narrow),
        "--dtype",
        "bf16",
    ]);
    succeed(&["convert", "export", text(&narrow), text(&half)]);

    let wide = Started::new(&hf);
    assert_eq!(wide.train("tp1", 4, &[]).code, Some(0));
    // Start from f32 and from bf16 weights, in a folder and in a checkpoint.
    let runs = [(&hf, "tp2-dp2-sp"), (&half, "tp2"), (&narrow, "dp2")].map(|(init, layout)| {
        let run = Started::new(init);
        for steps in [2, 4] {
            let ended = run.train(layout, steps, &["train.dtype=bf16"]);
            assert_eq!(ended.code, Some(0), "{ended:#?}");
            assert!(ended.stdout.contains("parameters in bf16"), "{ended:#?}");
            assert_eq!(
                ended.stdout.contains("after step 2 "),
                steps == 4,
                "{ended:#?}"
            );
        }
        for (found, expected) in run.losses().iter().zip(wide.losses()) {
            let relative = (found - expected).abs() / expected;
            assert!(relative <= 4e-3, "{layout}: {found}, in f32 {expected}");
        }
        assert_eq!(run.losses().len(), 4);
        run
    });

    let run = runs[0].path("run");
    succeed(&[
        "generate",
        text(&run),
        "--prompt",
        "ab",
        "--max-tokens",
        "3",
    ]);
    succeed(&["convert", "export", text(&run), text(&back)]);
    succeed(&["verify", text(&run), text(&back)]);
    succeed(&[
        "convert",
        "export",
        text(&run),
        text(&back_half),
        "--dtype",
        "bf16",
    ]);
    succeed(&["convert", "import", text(&back_half), text(&again)]);
    succeed(&["verify", text(&back_half), text(&again)]);
    let ended = megaburn(&["verify", text(&run), text(&back_half)]);
    assert_eq!(
        ended.code,
        Some(1),
        "the run's masters are no bf16 numbers: {ended:#?}"
    );
}
