//! Generated data as a source of samples.

use std::collections::BTreeSet;

use rstest::rstest;

use super::{GeneratedPart, GeneratedSource};
use crate::{
    error::DataError,
    packing::PackedSamplerConfig,
    sampler::Sampler,
    samples::{Sample, Samples},
    synthetic::{Synthetic, SyntheticKind},
    tokenizer::{ByteTokenizer, TextStream, Tokenizer},
};

const PARTS: [GeneratedPart; 3] = [
    GeneratedPart::Train,
    GeneratedPart::Valid,
    GeneratedPart::Test,
];

fn source(path: &str) -> GeneratedSource {
    GeneratedSource::parse(path).unwrap().unwrap()
}

fn tokens(path: &str, part: GeneratedPart, num: u64) -> Vec<u32> {
    let set = source(path).dataset(part, &ByteTokenizer).unwrap();
    set.sample(num as usize - 1, 0).unwrap()
}

#[test]
fn paths_name_generated_data() {
    let echo = source("synthetic:echo?distance=5&tokens=1000&seed=3");
    assert_eq!(echo.name(), "synthetic:echo?tokens=1000&seed=3&distance=5");
    assert_eq!(echo, source("synthetic:echo?seed=3&tokens=1000&distance=5"));
    let law = Synthetic::new(SyntheticKind::Echo { distance: 5 }, 3).unwrap();
    assert_eq!(echo.loss_floor(64), Some(law.floor(64)));
    let train = tokens(echo.name(), GeneratedPart::Train, 1000);
    assert_eq!(train, law.tokens(1000));
    let shown = echo.to_string();
    let hash = format!("{:016x}", echo.hash());
    assert_eq!(shown, format!("{}: generated, xxh3 {hash}", echo.name()));

    let defaults = [
        ("mock:ascending", "mock:ascending?tokens=100000000"),
        ("mock:random", "mock:random?tokens=100000000&seed=0"),
        (
            "synthetic:markov",
            "synthetic:markov?tokens=100000000&seed=0",
        ),
        (
            "synthetic:echo?",
            "synthetic:echo?tokens=100000000&seed=0&distance=7",
        ),
    ];
    for (path, name) in defaults {
        let source = source(path);
        assert_eq!(source.name(), name);
        let set = source
            .dataset(GeneratedPart::Valid, &ByteTokenizer)
            .unwrap();
        assert_eq!((set.name(), set.num_tokens()), (name, 100_000_000));
        assert_eq!(set.fingerprint().unwrap(), source.hash());
        assert_eq!(
            source.loss_floor(9).is_some(),
            path.starts_with("synthetic")
        );
    }
    for path in [
        "mock",
        "./mock:random",
        "synthetic",
        "a/mock:random",
        "mocks:random",
        "c:\\x",
    ] {
        assert!(GeneratedSource::parse(path).is_none(), "{path}");
    }
}

#[rstest]
#[case(
    "mock:",
    "there is no `mock:`; there are mock:ascending, mock:random, "
)]
#[case("mock:markov", "there is no `mock:markov`; there are ")]
#[case("synthetic:noise?tokens=3", "there is no `synthetic:noise`; ")]
#[case("mock:ascending?seed=1", "mock:ascending has no option `seed`; ")]
#[case(
    "synthetic:markov?distance=1",
    "synthetic:markov has no option `distance`; "
)]
#[case(
    "synthetic:echo?distance=0",
    "distance is `0`, but must be a number from 1 to "
)]
#[case(
    "mock:random?tokens=1e6",
    "tokens is `1e6`, but must be a number from 1 to "
)]
#[case("mock:random?tokens=0", "tokens is `0`, but must be ")]
#[case(
    "mock:random?tokens=9000000000000000000",
    "tokens is `9000000000000000000`, but must be "
)]
#[case("mock:random?seed=-1", "seed is `-1`, but must be a number from 0 to ")]
#[case("mock:random?tokens", "`tokens` is no option like tokens=1000; ")]
#[case("mock:random?seed=1&seed=2", "`seed` is given twice; ")]
fn other_paths_are_refused_with_what_there_is(#[case] path: &str, #[case] why: &str) {
    let error = GeneratedSource::parse(path)
        .unwrap()
        .unwrap_err()
        .to_string();
    let start = format!("`{path}` cannot be generated: {why}");
    assert!(error.starts_with(&start), "{error}");
    let end = format!("; a file of this name is given as ./{path}");
    assert!(error.ends_with(&end), "{error}");
}

#[rstest]
fn parts_have_different_tokens_of_one_rule(
    #[values(
        "mock:random",
        "synthetic:markov",
        "synthetic:echo",
        "synthetic:markov?seed=5"
    )]
    path: &str,
) {
    let [train, valid, test] = PARTS.map(|part| tokens(path, part, 5000));
    assert!(train != valid && valid != test && train != test);
    if path.starts_with("synthetic:markov") {
        // Each of 64 symbols has four successors, the same in all parts.
        let all = [train, valid, test];
        let pairs = all.iter().flat_map(|tokens| tokens.windows(2));
        let pairs: BTreeSet<&[u32]> = pairs.collect();
        assert!(pairs.len() <= 256, "{}", pairs.len());
    }
}

#[test]
fn samples_of_generated_data_need_no_memory_for_tokens() {
    let source = source("mock:random?tokens=1000000000000");
    let set = source
        .dataset(GeneratedPart::Train, &ByteTokenizer)
        .unwrap();
    assert_eq!(set.num_samples(100), 9_999_999_999);
    let sampler = Sampler::shuffled(set, 100, 4).unwrap();
    let batch = sampler.batch(9_999_999_990..9_999_999_995).unwrap();
    let distinct: BTreeSet<Vec<u32>> = batch.into_iter().map(|s| s.into_tokens()).collect();
    assert_eq!(distinct.len(), 5);
    assert!(distinct.iter().flatten().all(|token| *token < 260));
    assert_eq!(sampler.tokens(7).unwrap(), sampler.tokens(7).unwrap());
}

#[rstest]
fn documents_of_generated_data_are_packed(#[values(700, 2048)] seq_len: usize) {
    // One repetition of the mock documents has 204,637,097 tokens.
    for (path, num_tokens) in [
        ("mock:ascending?tokens=100000", 100_000),
        ("mock:random?tokens=300000000", 300_000_000),
        ("synthetic:echo?tokens=100001", 100_001),
    ] {
        for part in PARTS {
            let set = source(path).dataset(part, &ByteTokenizer).unwrap();
            let set = set.part("training", 0..num_tokens.min(100_001));
            let documents: Vec<_> = set.documents().collect::<Result<_, _>>().unwrap();
            assert_eq!(documents[0].start, 0);
            assert_eq!(documents.last().unwrap().end, set.num_tokens());
            let samples = PackedSamplerConfig::new(seq_len)
                .init(&set, |_| ())
                .unwrap();
            let mut num_labels = 0;
            for index in 0..samples.num_samples() {
                let Sample::Documents(documents) = samples.sample(index).unwrap() else {
                    panic!("documents are packed");
                };
                for tokens in documents {
                    num_labels += tokens.len() - 1;
                    let ends = tokens
                        .iter()
                        .rposition(|token| *token == ByteTokenizer::EOS);
                    assert!(
                        !path.starts_with("mock:random")
                            || ends.is_none_or(|at| at + 1 == tokens.len())
                    );
                }
            }
            assert_eq!(num_labels as u64, set.num_tokens() - documents.len() as u64);
        }
    }
    let set = source("mock:random?tokens=500000000").dataset(GeneratedPart::Valid, &ByteTokenizer);
    let (num, last) = set
        .unwrap()
        .documents()
        .fold((0, 0), |(num, last), document| {
            let document = document.unwrap();
            assert_eq!(document.start, last);
            (num + 1, document.end)
        });
    assert_eq!(last, 500_000_000);
    assert!((243_000..246_000).contains(&num), "{num}");
}

#[test]
fn hashes_differ_with_each_option() {
    let paths = [
        "mock:ascending",
        "mock:ascending?tokens=9",
        "mock:random",
        "mock:random?seed=1",
        "synthetic:markov",
        "synthetic:echo",
        "synthetic:echo?distance=8",
    ];
    let hashes: BTreeSet<u64> = paths.iter().map(|path| source(path).hash()).collect();
    assert_eq!(hashes.len(), paths.len());
}

#[test]
fn a_vocabulary_that_is_too_small_is_refused() {
    #[derive(Debug)]
    struct Small;
    impl Tokenizer for Small {
        fn vocab_size(&self) -> usize {
            63
        }
        fn encode(&self, _: &str) -> Result<Vec<u32>, DataError> {
            unreachable!("no text is encoded")
        }
        fn decode(&self, _: &[u32]) -> String {
            unreachable!("nothing is decoded")
        }
        fn stream(&self) -> Box<dyn TextStream + '_> {
            unreachable!("nothing is decoded")
        }
        fn eos(&self) -> u32 {
            0
        }
        fn bos(&self) -> Option<u32> {
            None
        }
        fn pad(&self) -> Option<u32> {
            None
        }
        fn hash(&self) -> u64 {
            1
        }
    }
    let error = source("synthetic:markov").dataset(GeneratedPart::Train, &Small);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("its tokens need 64 ids, but the tokenizer has 63; "),
        "{error}"
    );
    assert!(
        source("mock:random")
            .dataset(GeneratedPart::Train, &Small)
            .is_ok()
    );
}
