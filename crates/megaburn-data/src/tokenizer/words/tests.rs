//! Compares ids with those of `tokenizers`, on random text.

use std::fs;
use std::path::Path;

use rstest::rstest;

use super::*;

const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK: [&str; 3] = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r#"[!"\#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"#,
];

/// A fixture whose parts are replaced.
fn tokenizer(name: &str, parts: &Value) -> Encoder {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizers");
    let text = fs::read(path.join(name).join("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&text).unwrap();
    for (name, part) in parts.as_object().unwrap() {
        json[name] = part.clone();
    }
    let mut tokenizer = Encoder::from_bytes(json.to_string()).unwrap();
    tokenizer.with_truncation(None).unwrap();
    tokenizer.with_padding(None);
    tokenizer
}

fn split(expressions: &[&str]) -> Value {
    let split = |expression: &&str| {
        json!({
            "type": "Split",
            "pattern": {"Regex": expression},
            "behavior": "Isolated",
            "invert": false,
        })
    };
    let mut parts: Vec<Value> = expressions.iter().map(split).collect();
    parts.push(byte_level(false));
    json!({"type": "Sequence", "pretokenizers": parts})
}

/// Added tokens, which may be special, found in text that is normalized or in the raw one.
fn added(tokens: &[(&str, bool)], normalized: bool) -> Value {
    let token = |(index, (content, special)): (usize, &(&str, bool))| {
        json!({
            "id": 500 + index, "content": content, "special": special, "normalized": normalized,
            "lstrip": false, "rstrip": false, "single_word": false,
        })
    };
    json!({"added_tokens": tokens.iter().enumerate().map(token).collect::<Vec<_>>()})
}

fn byte_level(use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

/// Short runs of characters of one kind each: spaces, letters, digits, marks and signs of several
/// scripts, those that belong together among them, and any others.
fn text(draw: &mut fastrand::Rng) -> String {
    const KINDS: [&str; 14] = [
        "  ",
        " \t\n\r\u{b}\u{c}\u{85}\u{a0}\u{1680}\u{2003}\u{2028}\u{2029}\u{202f}\u{3000}\u{200b}\u{feff}",
        "etaoinshrdlu",
        "ETAOIN",
        "'sS'tT'rReEvVmMlLdD’ſ",
        "0123456789²½Ⅷ٣๓",
        ".,:;!?()[]{}<>/\\|@#$%^&*_-+=~`\"",
        "éüßøñÅİıǅʰªﬁ",
        "\u{301}\u{308}\u{327}\u{345}\u{1d165}\u{94d}\u{200d}\u{fe0f}",
        "日本語のテスト가각한글ｱ",
        "Приветשלוםनमस्तेไทย",
        "😀👩👧🇩🇪♥©→∑",
        "▁▁",
        "\0\u{1}\u{7f}\u{e000}\u{378}\u{10ffff}",
    ];
    /// Spellings of added tokens, and parts of them.
    const ADDED: [&str; 9] = [
        "<|endoftext|>",
        "<|tool|>",
        "<|tool",
        "<s>",
        "</s>",
        "<unk>",
        "<both>",
        "<both>er",
        "th>e",
    ];
    let mut text = String::new();
    for _ in 0..draw.usize(0..60) {
        if draw.u32(0..20) == 0 {
            text += draw.choice(ADDED).unwrap();
        }
        if draw.u32(0..9) == 0 {
            text.push(draw.char(..));
            continue;
        }
        let kind: Vec<char> = draw.choice(KINDS).unwrap().chars().collect();
        let most = if draw.u32(0..20) == 0 { 200 } else { 5 };
        for _ in 0..draw.usize(1..most) {
            text.push(*draw.choice(&kind).unwrap());
        }
    }
    text
}

/// Compares the ids of random texts, each alone and all as one.
fn compare(mut tokenizer: Encoder, is_special: bool) {
    tokenizer.set_encode_special_tokens(is_special);
    let words = Words::of(&tokenizer).expect("it encodes by words");
    let seed = fastrand::u64(..);
    let mut draw = fastrand::Rng::with_seed(seed);
    let mut texts: Vec<String> = (0..150).map(|_| text(&mut draw)).collect();
    texts.push(texts.concat());
    for text in &texts {
        let expected = tokenizer.encode_fast(text.as_str(), false).unwrap();
        let found = words.encode(&tokenizer, text).unwrap();
        assert!(found == expected.get_ids(), "seed {seed}: {text:?}");
    }
}

#[rstest]
#[case::gpt2("byte-level", json!({}))]
#[case::llama3("llama3", json!({}))]
#[case::qwen2("byte-level", json!({"pre_tokenizer": split(&[QWEN2]), "normalizer": {"type": "NFC"}}))]
#[case::o200k("llama3", json!({"pre_tokenizer": split(&[O200K])}))]
#[case::deepseek("byte-level", json!({"pre_tokenizer": split(&DEEPSEEK)}))]
#[case::gpt_neox("byte-level", json!({"normalizer": {"type": "NFKD"}}))]
#[case::one_word("byte-level", json!({"pre_tokenizer": byte_level(false)}))]
#[case::two_forms(
    "llama3",
    json!({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "NFKC"}]}})
)]
#[case::llama2("llama2", json!({}))]
#[case::mistral("mistral", json!({}))]
#[case::no_space_added(
    "llama2",
    json!({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}})
)]
#[case::space_added_to_each_part(
    "mistral",
    json!({"pre_tokenizer": {
        "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false
    }})
)]
#[case::added_tokens("byte-level", added(&[("<both>", true), ("<both>er", false), ("th>e", false)], true))]
#[case::added_to_raw_text("byte-level", added(&[("<both>", false), ("<both>er", true), ("th>e", false)], false))]
#[case::added_to_mistral("mistral", added(&[("<both>", true), ("<both>er", false), ("th>e", false)], true))]
fn ids_are_those_of_the_library(
    #[case] name: &str,
    #[case] parts: Value,
    #[values(false, true)] is_special: bool,
) {
    compare(tokenizer(name, &parts), is_special);
}

#[rstest]
#[case::possessive("byte-level", json!({"pre_tokenizer": split(&[r"\p{N}{1,3}+|\p{L}++|\s+"])}))]
#[case::looks_ahead("byte-level", json!({"pre_tokenizer": split(&[r"a(?!b)|\s+(?!\S)|\s+"])}))]
#[case::looks_around("byte-level", json!({"pre_tokenizer": split(&[r"\b\w+|\W+"])}))]
#[case::matches_nothing("byte-level", json!({"pre_tokenizer": split(&[r"\s*"])}))]
#[case::refers_back("byte-level", json!({"pre_tokenizer": split(&[r"(.)\1"])}))]
#[case::adds_a_space(
    "byte-level",
    json!({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true}})
)]
#[case::lower_case("byte-level", json!({"normalizer": {"type": "Lowercase"}}))]
#[case::unigram("unigram", json!({}))]
#[case::takes_spaces_away(
    "byte-level",
    json!({"added_tokens": [{
        "id": 500, "content": "<mask>", "special": true, "normalized": false,
        "lstrip": true, "rstrip": false, "single_word": false
    }]})
)]
fn what_works_otherwise_is_left_to_the_library(#[case] name: &str, #[case] parts: Value) {
    assert!(Words::of(&tokenizer(name, &parts)).is_none());
}

#[test]
fn a_vocabulary_that_joins_words_is_left_to_the_library() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tokenizers");
    let text = fs::read_to_string(path.join("llama2/tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    let next = json["model"]["vocab"].as_object().unwrap().len();
    json["model"]["vocab"]["a▁"] = next.into();
    let joining = Encoder::from_bytes(json.to_string()).unwrap();
    assert!(Words::of(&joining).is_none());
}

#[test]
fn bytes_are_spelled_by_distinct_characters() {
    let mut spelled = spelling_of_bytes();
    assert_eq!((spelled[b' ' as usize], spelled[0xAD]), ('Ġ', 'Ń'));
    spelled.sort();
    spelled.dedup();
    assert_eq!(spelled.len(), 256);
}
