//! Tests that ids and decoded text of each file format equal those of the Python originals, by
//! hashes that `tests/tools/tokenizer_files.py` wrote.

use std::{collections::BTreeMap, fs, path::Path};

use megaburn_data::{HfTokenizer, Tokenizer};
use rstest::rstest;
use tempfile::TempDir;

use crate::{fixtures, folder};

fn fnv(bytes: impl IntoIterator<Item = u8>) -> String {
    let hash = bytes.into_iter().fold(0x811C_9DC5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    format!("{hash:08x}")
}

fn hash(ids: &[u32]) -> String {
    fnv(ids.iter().flat_map(|id| id.to_le_bytes()))
}

/// What differs between the tokenizer in a folder and the hashes in its folder, and the number of
/// strings.
fn differences(root: &Path, name: &str) -> (Vec<String>, usize) {
    let strings = fs::read(root.join("strings.json")).unwrap();
    let strings: Vec<(String, usize)> = serde_json::from_slice(&strings).unwrap();
    let expected = fs::read_to_string(root.join(name).join("expected.txt")).unwrap();
    let tokenizer = open(&root.join(name));
    let reserved = [Some(tokenizer.eos()), tokenizer.bos(), tokenizer.pad()];
    let texts: Vec<String> = strings
        .iter()
        .map(|(text, times)| text.repeat(*times))
        .collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let plain = tokenizer.encode_batch(&texts).unwrap();
    let prompts = tokenizer.encode_prompts(&texts).unwrap();
    let mut differ = Vec::new();
    assert_eq!(expected.lines().count(), texts.len());
    for (index, expected) in expected.lines().enumerate() {
        let (text, plain, prompt) = (texts[index], &plain[index], &prompts[index]);
        assert_eq!(tokenizer.encode(text).unwrap(), *plain, "{name}: {text:?}");
        assert_eq!(
            tokenizer.encode_prompt(text).unwrap(),
            *prompt,
            "{name}: {text:?}"
        );
        assert!(
            !plain.iter().any(|&id| reserved.contains(&Some(id))),
            "{name}: {text:?}"
        );
        let known: Vec<u32> = plain
            .iter()
            .copied()
            .filter(|&id| Some(id) != unknown(&tokenizer))
            .collect();
        let decoded = tokenizer.decode(&known);
        if known.len() < 60 && !expected.ends_with('-') {
            let mut stream = tokenizer.stream();
            let mut streamed: String = known.iter().map(|&id| stream.push(id)).collect();
            streamed += &stream.finish();
            assert_eq!(streamed, decoded, "{name}: {text:?}");
        }
        let found = [hash(plain), hash(prompt), fnv(decoded.bytes())];
        let parts = ["ids", "prompt", "text"]
            .into_iter()
            .zip(&found)
            .zip(expected.split(' '));
        for ((part, found), expected) in parts {
            if found != expected && expected != "-" {
                let what = match part {
                    "ids" => format!("{plain:?}"),
                    "prompt" => format!("{prompt:?}"),
                    _ => format!("{decoded:?}"),
                };
                differ.push(format!(
                    "{name}, string {index}, {part}: {text:?} gives {what}"
                ));
            }
        }
    }
    (differ, texts.len())
}

/// The tokenizer in a folder, which may name another fixture that has its `tokenizer.json`.
fn open(path: &Path) -> HfTokenizer {
    let Ok(base) = fs::read_to_string(path.join("base.txt")) else {
        return HfTokenizer::open(path).unwrap();
    };
    let dir = TempDir::new().unwrap();
    let base = folder(base.trim()).join("tokenizer.json");
    fs::copy(base, dir.path().join("tokenizer.json")).unwrap();
    for file in ["tokenizer_config.json", "config.json"] {
        if path.join(file).exists() {
            fs::copy(path.join(file), dir.path().join(file)).unwrap();
        }
    }
    let tokenizer = HfTokenizer::open(dir.path()).unwrap();
    tokenizer.check_prompts().unwrap();
    tokenizer
}

fn unknown(tokenizer: &HfTokenizer) -> Option<u32> {
    let names = ["<unk>", "[UNK]"];
    names.iter().find_map(|name| tokenizer.token_to_id(name))
}

#[rstest]
fn ids_and_text_are_those_of_the_original(
    #[values(
        "sp-unigram",
        "sp-unigram-bytes",
        "sp-bpe-llama",
        "sp-bpe-suffix",
        "sp-bpe-no-prefix",
        "sp-t5",
        "sp-t5-usual",
        "sp-mt5",
        "tiktoken-cl100k",
        "tiktoken-o200k",
        "tiktoken-llama3",
        "tiktoken-qwen",
        "bert-uncased",
        "bert-cased",
        "bert-accents",
        "class-gpt2",
        "class-gpt2-prefix",
        "class-gpt2-llama3",
        "class-qwen2",
        "class-qwen2-own",
        "class-llama",
        "class-llama-legacy",
        "class-llama-no-prefix",
        "class-llama-mistral",
        "class-llama-bytes",
        "class-gemma",
        "class-t5",
        "class-bert",
        "class-bert-cased"
    )]
    name: &str,
) {
    let (differ, count) = differences(&fixtures("tokenizer-files"), name);
    assert!(count >= 300);
    assert!(
        differ.is_empty(),
        "{} of {count}: {:#?}",
        differ.len(),
        &differ[..differ.len().min(5)]
    );
}

#[rstest]
fn sentinels_have_the_ids_of_transformers(#[values("sp-t5", "sp-t5-usual", "sp-mt5")] name: &str) {
    let folder = fixtures("tokenizer-files").join(name);
    let ids = fs::read(folder.join("ids.json")).unwrap();
    let ids: BTreeMap<String, u32> = serde_json::from_slice(&ids).unwrap();
    let tokenizer = open(&folder);
    let found: BTreeMap<String, u32> = ids
        .keys()
        .map(|token| (token.clone(), tokenizer.token_to_id(token).unwrap()))
        .collect();
    assert_eq!(found, ids);
    let highest = ids.values().max().unwrap() + 1;
    assert!(tokenizer.vocab_size() >= highest as usize, "{name}");
    let ids = tokenizer.encode_prompt("the river").unwrap();
    assert_eq!(ids.last(), tokenizer.token_to_id("</s>").as_ref(), "{name}");
}

#[test]
fn sentinels_of_an_odd_number_are_refused() {
    let folder = fixtures("tokenizer-files").join("sp-t5");
    let dir = TempDir::new().unwrap();
    fs::copy(folder.join("spiece.model"), dir.path().join("spiece.model")).unwrap();
    for count in ["-1", "\"5\"", "99999999999"] {
        let config = dir.path().join("tokenizer_config.json");
        let text = format!("{{\"tokenizer_class\": \"T5Tokenizer\", \"extra_ids\": {count}}}");
        fs::write(config, text).unwrap();
        let error = HfTokenizer::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("give the number of sentinels"), "{error}");
    }
}

/// Compares all tokenizers in the folder `MEGABURN_TOKENIZERS`, which `tokenizer_files.py --full`
/// has filled.
#[test]
#[ignore = "it needs the folder that tests/tools/tokenizer_files.py --full writes"]
fn ids_and_text_of_many_strings_are_those_of_the_original() {
    let root = std::env::var("MEGABURN_TOKENIZERS").expect("MEGABURN_TOKENIZERS names the folder");
    let (mut total, mut compared) = (0, 0);
    for entry in fs::read_dir(&root).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if !Path::new(&root).join(&name).join("expected.txt").exists() {
            continue;
        }
        let (differ, count) = differences(Path::new(&root), &name);
        println!("{name}: {count} strings, {} mismatches", differ.len());
        differ
            .iter()
            .take(10)
            .for_each(|line| println!("  {}", line.chars().take(600).collect::<String>()));
        total += differ.len();
        compared += 1;
    }
    assert!(compared > 0, "{root} has no tokenizer with an expected.txt");
    assert_eq!(total, 0);
}
