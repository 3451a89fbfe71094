//! Dense models that are upcycled to mixtures of experts.

use rstest::rstest;

use crate::{models::transformers::fixture, runs::child::Ranks};

/// Copies of an MLP whose weights add up to one compute the same as the MLP.
#[rstest]
fn an_upcycled_model_computes_what_the_dense_one_does(
    #[values("llama", "mistral", "qwen3")] name: &str,
    #[values("1", "4")] granularity: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let hf = fixture(name);
    let up = dir.path().join("up");
    let [hf, up] = [&hf, &up].map(|path| path.to_str().unwrap());
    let cuts = ["--experts", "4", "--granularity", granularity];
    let told = Ranks::command(&[&["convert", "upcycle", hf, up], &cuts[..]].concat()).finish();
    let experts = 4 * granularity.parse::<usize>().unwrap();
    assert!(
        told[0]
            .stdout
            .contains(&format!("{experts} experts per layer")),
        "{told:?}"
    );
    let write = |model: &str, layout: &str| {
        let ask = [
            "generate",
            model,
            "--max-tokens",
            "16",
            "--ignore-eos",
            "--layout",
            layout,
        ];
        let prompts = [
            "--prompt-ids",
            "5,17,3",
            "--prompt-ids",
            "9,8,7,6,5,4,3,2,1,40,41,42",
        ];
        Ranks::command(&[&ask[..], &prompts].concat()).finish()[0]
            .stdout
            .clone()
    };
    let expected = write(hf, "tp1");
    assert_eq!(write(up, "tp1"), expected);
    assert_eq!(write(up, "dp4-ep4"), expected);
    // Export the model, and load it from there.
    let out = dir.path().join("hf");
    let out = out.to_str().unwrap();
    Ranks::command(&["convert", "export", up, out]).finish();
    assert_eq!(write(out, "dp2-ep2"), expected);
}

#[rstest]
#[case("gpt2", &[], "gpt2 has no MoE counterpart; llama, mistral and qwen3 have one")]
#[case("llama-biases", &[], "experts have no biases")]
#[case("llama", &["--granularity", "7"], "an MLP of width 48 is not divisible by granularity 7")]
#[case("llama", &["--top-k", "9"], "top_k 9 is more than the number of experts, 8")]
fn what_cannot_become_experts_is_refused(
    #[case] name: &str,
    #[case] flags: &[&str],
    #[case] message: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let hf = fixture(name);
    let up = dir.path().join("up");
    let args = [
        "convert",
        "upcycle",
        hf.to_str().unwrap(),
        up.to_str().unwrap(),
    ];
    let ended = Ranks::command(&[&args[..], flags].concat())
        .wait_all()
        .remove(0);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains(message) && !up.exists(), "{ended:?}");
}
