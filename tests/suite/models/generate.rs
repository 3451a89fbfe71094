//! `megaburn generate` with text: tokenizers, stop strings, sampling, ranks.

use std::{fs, path::PathBuf};

use megaburn::mesh::{PositionRng, Purpose};
use rstest::rstest;
use serde_json::Value;

use crate::{
    models::round_trip::{megaburn, succeed, text},
    models::transformers::fixture,
    runs::child::Ranks,
};
use megaburn_test_support::text::fresh_seed;

/// A model of 300 token ids with the byte-level tokenizer that `megaburn tokenize` writes.
fn model_with_tokenizer() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let hf = dir.path().join("hf");
    let corpus = dir.path().join("corpus.txt");
    fs::create_dir(&hf).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture("qwen3-tied").join(file), hf.join(file)).unwrap();
    }
    fs::write(
        &corpus,
        "the cat sat on the mat; the hat that the cat had. ".repeat(50),
    )
    .unwrap();
    succeed(&[
        "tokenize",
        "--data",
        text(&corpus),
        "--vocab",
        "280",
        "--out",
        text(&hf),
    ]);
    (dir, hf)
}

fn written(args: &[&str]) -> Vec<Value> {
    let found = succeed(&[args, &["--json"]].concat());
    found
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn text_goes_in_and_out_with_the_models_own_tokenizer() {
    let (dir, hf) = model_with_tokenizer();
    let checkpoint = dir.path().join("checkpoint");
    succeed(&["convert", "import", text(&hf), text(&checkpoint)]);
    let ask = [
        "--prompt",
        "the cat",
        "--prompt",
        "sat on a",
        "--max-tokens",
        "20",
    ];
    let alone = written(&[&["generate", text(&hf)], &ask[..]].concat());
    assert!(
        alone.iter().all(|line| line["finish"] == "max_tokens"),
        "{alone:?}"
    );
    assert_eq!(
        alone,
        written(
            &[
                &["generate", text(&checkpoint), "--layout", "tp2"],
                &ask[..]
            ]
            .concat()
        )
    );
    let plain = succeed(&[&["generate", text(&hf)], &ask[..]].concat());
    let expected = format!(
        "the cat{}\n---\nsat on a{}\n",
        alone[0]["text"].as_str().unwrap(),
        alone[1]["text"].as_str().unwrap()
    );
    assert_eq!(plain, expected);

    // A stop string ends the text at its first occurrence, even across tokens.
    let draw = |seed: usize, stop: &[&str]| {
        let seed = seed.to_string();
        let args = [
            "generate",
            text(&hf),
            "--prompt",
            "the cat",
            "--max-tokens",
            "24",
            "--seed",
        ];
        let stop = stop.iter().flat_map(|stop| ["--stop", stop]);
        let args = args
            .into_iter()
            .chain([seed.as_str(), "--temperature", "1.5"])
            .chain(stop);
        written(&args.collect::<Vec<_>>()).remove(0)
    };
    for len in [1, 3, 5] {
        let found = (0..100).find_map(|seed| {
            let whole = draw(seed, &[])["text"].as_str().unwrap().to_string();
            let is_plain = |at: &usize| {
                let part = whole.get(*at..at + len);
                part.is_some_and(|part| part.chars().all(|c| c.is_ascii_lowercase() || c == ' '))
            };
            let at = (4..whole.len()).find(is_plain)?;
            Some((seed, whole[at..at + len].to_string(), whole))
        });
        let (seed, stop, whole) = found.expect("a text with plain characters");
        let stopped = draw(seed, &["never written", &stop]);
        assert_eq!(
            stopped["text"],
            whole[..whole.find(&stop).unwrap()],
            "{stop:?} in {whole:?}"
        );
        assert_eq!(stopped["finish"], "stop");
    }
}

#[test]
fn processes_write_what_threads_write_and_one_of_them_prints() {
    let (_dir, hf) = model_with_tokenizer();
    let ask = |seed| {
        let args = [
            "generate",
            text(&hf),
            "--prompt",
            "the",
            "--max-tokens",
            "12",
            "--seed",
            seed,
        ];
        [
            &args[..],
            &["--temperature", "0.9", "--top-k", "40", "--top-p", "0.9"],
        ]
        .concat()
    };
    let threads = succeed(&[&ask("7")[..], &["--layout", "tp4"]].concat());
    assert_eq!(threads, succeed(&ask("7")));
    assert_ne!(threads, succeed(&ask("8")));
    let ended = Ranks::commands(2, &ask("7")).finish();
    assert_eq!((&ended[0].stdout, ended[1].stdout.as_str()), (&threads, ""));
}

/// Each layout with keys of `[parallel]`. Its logits are bit-identical to the same tp without a
/// pipeline.
const PIPELINES: [(&str, &[&str]); 10] = [
    ("pp2", &[]),
    ("pp3", &[]),
    ("pp4", &[]),
    ("tp2-pp2-sp", &["chunks=2"]),
    ("pp2", &["first_stage_layers=3"]),
    ("pp2", &["pipeline_layout=E|t*4L"]),
    (
        "pp2",
        &["schedule=interleaved", "pipeline_layout=Et|tt|t|L"],
    ),
    (
        "pp3",
        &["chunks=2", "count_embedding=true", "count_loss=true"],
    ),
    ("pp2", &["schedule=zb-v"]),
    ("tp2-pp2", &["schedule=zb-v", "pipeline_layout=E|tt|t|tL"]),
];

#[rstest]
fn a_pipeline_writes_what_its_tp_alone_writes(
    #[values("llama", "gpt2")] name: &str,
    #[values("0", "1.3")] temperature: &str,
) {
    let seed = fresh_seed();
    let rng = PositionRng::new(seed, Purpose::Sampling, "prompts");
    // The last prompt grows beyond the longest sequence.
    let prompts = [1, 7, 120].map(|len: u64| {
        let ids: Vec<_> = (0..len)
            .map(|at| rng.below(1000 * len + at, 96).to_string())
            .collect();
        ids.join(",")
    });
    let hf = fixture(name);
    let seed = seed.to_string();
    let mut ask = vec!["generate", text(&hf), "--max-tokens", "12", "--ignore-eos"];
    ask.extend(["--temperature", temperature, "--seed", &seed]);
    prompts
        .iter()
        .for_each(|ids| ask.extend(["--prompt-ids", ids]));
    let expected =
        ["tp1", "tp2"].map(|layout| written(&[&ask[..], &["--layout", layout]].concat()));
    for (layout, sets) in PIPELINES {
        let sets: Vec<_> = sets.iter().map(|set| format!("parallel.{set}")).collect();
        let mut args = [&ask[..], &["--layout", layout]].concat();
        sets.iter().for_each(|set| args.extend(["--set", set]));
        let expected = &expected[usize::from(layout.starts_with("tp2"))];
        assert_eq!(&written(&args), expected, "{layout} {sets:?}");
    }
}

#[rstest]
fn ranks_that_share_prompts_write_what_one_rank_writes(
    #[values("llama", "gpt2", "mistral")] name: &str,
    #[values("cp2", "cp3", "tp2-cp2-sp", "cp2-pp2", "tp2-cp2-pp2")] layout: &str,
) {
    let seed = fresh_seed();
    let rng = PositionRng::new(seed, Purpose::Sampling, "shared prompts");
    let prompts = [50, 2, 120].map(|len: u64| {
        let ids: Vec<_> = (0..len)
            .map(|at| rng.below(1000 * len + at, 96).to_string())
            .collect();
        ids.join(",")
    });
    let hf = fixture(name);
    let mut ask = vec!["generate", text(&hf), "--max-tokens", "8", "--ignore-eos"];
    prompts
        .iter()
        .for_each(|ids| ask.extend(["--prompt-ids", ids]));
    let found = written(&[&ask[..], &["--layout", layout]].concat());
    assert_eq!(found, written(&ask), "{layout}");
}

#[test]
fn a_launched_pipeline_writes_what_one_rank_writes() {
    let (dir, hf) = model_with_tokenizer();
    let checkpoint = dir.path().join("checkpoint");
    succeed(&["convert", "import", text(&hf), text(&checkpoint)]);
    let ask = [
        "generate",
        text(&checkpoint),
        "--prompt",
        "the",
        "--prompt",
        "a hat",
    ];
    let ask = [
        &ask[..],
        &["--max-tokens", "12", "--temperature", "1.1", "--seed", "3"],
    ]
    .concat();
    let ask = [&ask[..], &["--stop", "q"]].concat();
    let split = [
        &ask[..],
        &["--layout", "pp2", "--set", "parallel.count_loss=true"],
    ]
    .concat();
    let launch = [
        "launch",
        "--nproc",
        "2",
        "--",
        env!("CARGO_BIN_EXE_megaburn-under-test"),
    ];
    assert_eq!(succeed(&[&launch[..], &split].concat()), succeed(&ask));
}

#[rstest]
#[case(&["--prompt", "a"], "because the model has no tokenizer")]
#[case(&[], "`--prompt` is absent")]
#[case(&["--prompt-ids", "1,x"], "`--prompt-ids` is \"1,x\"")]
#[case(&["--prompt-ids", "128"], "prompt 0 has token 128, but the model's vocabulary is 128")]
#[case(&["--prompt-ids", "1", "--stop", "x"], "because the model has no tokenizer")]
#[case(&["--prompt", "a", "--tokenizer", "byte", "--stop", ""], "`--stop` is empty")]
#[case(&["--prompt-ids", "1", "--top-k", "0"], "top-k is 0")]
#[case(&["--prompt-ids", "1", "--top-p", "1.5"], "top-p is 1.5")]
#[case(&["--prompt-ids", "1", "--temperature=-1"], "temperature is -1")]
#[case(&["--prompt-ids", "1", "--layout", "dp2"], "generation shards the model and the prefill of prompts over ranks")]
#[case(&["--prompt-ids", "1", "--layout", "pp2-dp2"], "`--layout` is pp2-dp2: it must be made of tpN, ppN, cpN and epN")]
#[case(&["--prompt-ids", "1", "--layout", "pp5"], "4 layers cannot fill 5 pipeline stages")]
#[case(&["--prompt-ids", "1", "--layout", "pp2", "--set", "parallel.chunks=3"], "4 layers cannot fill 6 pipeline stages")]
#[case(&["--prompt-ids", "1", "--layout", "pp2", "--set", "parallel.pipeline_layout=Et|tL"], "it has 2 layers (t), but the model has 4")]
#[case(&["--prompt-ids", "1", "--layout", "pp2", "--set", "parallel.zero=1"], "`--set` is parallel.zero=1: it must be `parallel.` followed by one of schedule, chunks")]
#[case(&["--prompt-ids", "1", "--layout", "tp2", "--set", "parallel.chunks=2"], "`--set` is parallel.chunks=2: it must be omitted, because --layout tp2 has no pp")]
#[case(&["--prompt-ids", "1", "--layout", "tp16"], "attention heads 8 is not divisible by tp 16")]
#[case(&["--prompt-file", "/no/such/file"], "cannot read `/no/such/file`")]
#[case(&["--prompt", "a", "--tokenizer", "/no/such"], "/no/such")]
fn what_cannot_be_asked_is_refused(#[case] args: &[&str], #[case] message: &str) {
    let hf = fixture("llama");
    let ended = megaburn(&[&["generate", text(&hf)], args].concat());
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains(message), "{ended:#?}");
    assert_eq!(
        (ended.stderr.lines().count(), ended.stdout.as_str()),
        (1, "")
    );
}
