//! The tokenizer of a T5 run: its file, its prompts, and the tokens around the decoder's text.

use std::{fs, path::Path, sync::Arc};

use burn::prelude::Device;
use megaburn::{
    collective::{Group, ProcessGroups},
    data::{HfTokenizer, Sample, Tokenizer},
    mesh::Layout,
    train::{ConfigLayers, RunData, Trainer},
};
use rstest::rstest;
use serde_json::Value;

use crate::{
    encoders::corpus::Sentences,
    models::round_trip::{megaburn, succeed, text},
};
use megaburn_test_support::text::fresh_seed;

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn train(sentences: &Sentences, steps: &str, sets: &[&str]) {
    let own = sentences.settings();
    let own = own.iter().filter(|set| !set.starts_with("train.steps"));
    let batch = ["train.global_batch=2", "train.micro_batch=1"];
    let all = own.map(String::as_str).chain(batch);
    let all = all.chain(sets.iter().copied());
    let mut args = vec!["train", "--layout", "tp1", "--steps", steps];
    args.extend(all.flat_map(|set| ["--set", set]));
    succeed(&args);
}

/// Encodes the documents with a tokenizer into the data set `name`; the settings to train on it.
fn encode(sentences: &Sentences, tokenizer: &Path, name: &str) -> [String; 2] {
    let data = sentences.path(name);
    let corpus = sentences.path("text.jsonl");
    let args = ["data", "preprocess", text(&corpus), "--split-sentences"];
    let of = ["--tokenizer", text(tokenizer), "--out", text(&data)];
    succeed(&[args, of].concat());
    [
        format!("data.path={}", data.display()),
        format!("data.tokenizer={}", tokenizer.display()),
    ]
}

/// The ids of a prompt and of what is generated, and why it ended.
fn generated(model: &Path, prompt: &str, args: &[&str]) -> (Vec<u64>, Vec<u64>, String) {
    let all = ["generate", text(model), "--prompt", prompt, "--json"];
    let ended = megaburn(&[&all[..], &["--max-tokens", "6"], args].concat());
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let line: Value = serde_json::from_str(&ended.stdout).unwrap();
    let ids = |key: &str| {
        let ids = line[key].as_array().unwrap().iter();
        ids.map(|id| id.as_u64().unwrap()).collect()
    };
    let finish = line["finish"].as_str().unwrap().to_string();
    (ids("prompt_ids"), ids("ids"), finish)
}

/// A vocabulary whose unknown token is not BERT's is one too, in a run that resumes and in one of an
/// older version, which kept it as `tokenizer.json`.
#[rstest]
fn a_run_keeps_and_publishes_a_vocabulary(#[values("[UNK]", "<unk>")] unknown: &str) {
    let sentences = Sentences::new(20, fresh_seed()).for_t5();
    let vocab = fs::read_to_string(sentences.path("vocab.txt")).unwrap();
    let vocab = vocab.replace("[UNK]", unknown);
    fs::create_dir(sentences.path("own")).unwrap();
    let file = sentences.path("own/words.txt");
    fs::write(&file, &vocab).unwrap();
    let config = format!("{{\"unk_token\": \"{unknown}\", \"do_lower_case\": true}}");
    fs::write(sentences.path("own/tokenizer_config.json"), config).unwrap();
    let [data, tokenizer] = encode(&sentences, &file, "words");
    train(&sentences, "1", &[&data, &tokenizer]);
    let kept = sentences.path("run/hf");
    assert_eq!(fs::read_to_string(kept.join("vocab.txt")).unwrap(), vocab);
    assert!(!kept.join("tokenizer.json").exists());
    let run = sentences.path("run");
    succeed(&["train", "--resume", text(&run), "--steps", "2"]);
    let published = sentences.path("published");
    succeed(&["convert", "export", text(&run), text(&published)]);
    let original = HfTokenizer::open(&file).unwrap();
    let opened = HfTokenizer::open(&published).unwrap();
    assert_eq!(opened.path(), published.join("vocab.txt"));
    assert_eq!(opened.hash(), original.hash());
    let said = json(&published.join("tokenizer_config.json"));
    assert_eq!(said["tokenizer_class"], "BertTokenizer");
    assert_eq!(said["unk_token"], unknown);
    let more = said["additional_special_tokens"].as_array().unwrap();
    assert_eq!(more.len(), 6, "{more:?}");
    if unknown == "[UNK]" {
        fs::rename(kept.join("vocab.txt"), kept.join("tokenizer.json")).unwrap();
        succeed(&["train", "--resume", text(&run), "--steps", "3"]);
        fs::remove_dir_all(&published).unwrap();
        succeed(&["convert", "export", text(&run), text(&published)]);
        assert!(published.join("vocab.txt").is_file());
        assert!(!published.join("tokenizer.json").exists());
    }
}

#[test]
fn a_prompt_is_read_as_the_samples_are() {
    let sentences = Sentences::new(30, fresh_seed()).for_t5();
    train(&sentences, "2", &[]);
    let run = sentences.path("run");
    let vocabulary = sentences.path("vocab.txt");
    let tokenizer = HfTokenizer::open(&vocabulary).unwrap();
    let id = |token: &str| u64::from(tokenizer.token_to_id(token).unwrap());
    let (prompt, ids, finish) = generated(&run, "the <extra_id_0> falls<extra_id_1> . [EOS]", &[]);
    let tokens = ["the", "<extra_id_0>", "falls", "<extra_id_1>", ".", "[EOS]"];
    assert_eq!(prompt, tokens.map(id));
    let given = ["--tokenizer", text(&vocabulary)];
    let (_, same, _) = generated(&run, "the <extra_id_0> falls<extra_id_1> . [EOS]", &given);
    assert_eq!(same, ids);
    // The end is the one that the model was trained with, whether the tokenizer is given or not.
    assert!(ids.len() > 1 || finish == "eos", "{ids:?}");
    let file = run.join("hf/generation_config.json");
    let mut config = json(&file);
    assert_eq!(config["eos_token_id"], id("[EOS]"));
    assert_eq!(config["decoder_start_token_id"], id("[BOS]"));
    config["eos_token_id"] = ids[0].into();
    fs::write(&file, config.to_string()).unwrap();
    for args in [&[][..], &given] {
        let (_, cut, finish) = generated(&run, "the <extra_id_0> falls<extra_id_1> . [EOS]", args);
        assert!(finish == "eos" && cut.len() <= 1, "{cut:?}, {finish}");
    }
}

/// CodeT5 begins its decoder's text with the padding, although its tokenizer has a bos.
#[test]
fn samples_begin_and_end_as_the_model_that_a_run_starts_from() {
    let sentences = Sentences::new(20, fresh_seed()).for_t5();
    train(&sentences, "1", &[]);
    let model = sentences.path("model");
    let run = sentences.path("run");
    succeed(&["convert", "export", text(&run), text(&model)]);
    let tokenizer = HfTokenizer::open(&model).unwrap();
    let id = |token: &str| tokenizer.token_to_id(token).unwrap();
    for file in ["config.json", "generation_config.json"] {
        let mut config = json(&model.join(file));
        config["decoder_start_token_id"] = id("[PAD]").into();
        config["eos_token_id"] = vec![id("[SEP]"), id("[MASK]")].into();
        fs::write(model.join(file), config.to_string()).unwrap();
    }
    let sets = |[data, tokenizer]: [String; 2]| {
        let settings = sentences.settings().into_iter();
        let kept = settings.filter(|set| set.starts_with("data."));
        let more = [
            data,
            tokenizer,
            format!("model.init={}", model.display()),
            format!("run.dir={}", sentences.path("next").display()),
            "train.global_batch=1".into(),
            "train.micro_batch=1".into(),
        ];
        kept.chain(more).collect::<Vec<_>>()
    };
    let first = |sets: &[String]| {
        let config = sets.iter().fold(ConfigLayers::new(), |layers, set| {
            layers.with_set(set).unwrap()
        });
        let config = config.load().unwrap();
        let data = Arc::new(RunData::load(&config).unwrap());
        let groups = ProcessGroups::new(&Group::single(config.run.seed), Layout::SINGLE).unwrap();
        let device = Device::flex().autodiff();
        let trainer = Trainer::new(Arc::new(config), groups, device, data).unwrap();
        let (_, samples) = trainer.micro_batch(0).unwrap();
        let Sample::T5(sample) = &samples[0] else {
            panic!("{samples:?}");
        };
        let mut labels = sample.labels.iter().zip(&sample.loss_mask);
        let last = labels.rfind(|(_, counts)| **counts).unwrap();
        (sample.text_dec[0], *last.0 as u32)
    };
    // With another tokenizer, the model's ids mean nothing.
    let vocab = fs::read_to_string(sentences.path("vocab.txt")).unwrap();
    let other = sentences.path("other.txt");
    fs::write(&other, vocab.replace("stays", "stay")).unwrap();
    let other = sets(encode(&sentences, &other, "other"));
    assert_eq!(first(&other), (id("[BOS]"), id("[EOS]")));
    let own = sets(encode(&sentences, &model, "own"));
    assert_eq!(first(&own), (id("[PAD]"), id("[SEP]")));
    // A run that resumes reads the same samples.
    let mut args = vec!["train", "--layout", "tp1", "--steps", "1"];
    args.extend(own.iter().flat_map(|set| ["--set", set]));
    succeed(&args);
    assert_eq!(first(&own), (id("[PAD]"), id("[SEP]")));
}

/// The SentencePiece model of T5 in `tests/fixtures/tokenizer-files`.
#[test]
fn a_run_keeps_and_publishes_a_sentencepiece_model() {
    let sentences = Sentences::new(20, fresh_seed()).for_t5();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tokenizer-files/sp-t5");
    let own = sentences.path("t5");
    fs::create_dir(&own).unwrap();
    fs::copy(fixture.join("spiece.model"), own.join("my.model")).unwrap();
    fs::write(own.join("config.json"), "{\"model_type\": \"t5\"}").unwrap();
    let file = own.join("my.model");
    let original = HfTokenizer::open(&file).unwrap();
    let [data, tokenizer] = encode(&sentences, &file, "pieces");
    train(&sentences, "1", &[&data, &tokenizer]);
    let run = sentences.path("run");
    succeed(&["train", "--resume", text(&run), "--steps", "2"]);
    let published = sentences.path("published");
    succeed(&["convert", "export", text(&run), text(&published)]);
    let opened = HfTokenizer::open(&published).unwrap();
    assert_eq!(opened.path(), published.join("spiece.model"));
    assert_eq!(opened.hash(), original.hash());
    assert_eq!(opened.token_to_id("<extra_id_0>"), Some(118 + 99));
    let said = json(&published.join("tokenizer_config.json"));
    assert_eq!(said["tokenizer_class"], "T5Tokenizer");
    let (prompt, _, _) = generated(&run, "the <extra_id_0> river", &[]);
    let expected = original.encode_prompt("the <extra_id_0> river").unwrap();
    assert_eq!(
        prompt,
        expected.iter().map(|id| u64::from(*id)).collect::<Vec<_>>()
    );
    assert_eq!(*prompt.last().unwrap(), 1, "T5's prompts end with </s>");
}
