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
        let found = words.encode(&tokenizer, text, false).unwrap();
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

/// Cuts random texts where pieces may end, and compares the ids of the pieces with those of the
/// library for the whole text. Returns the number of pieces.
fn compare_pieces(mut tokenizer: Encoder, is_special: bool) -> usize {
    tokenizer.set_encode_special_tokens(is_special);
    let words = Words::of(&tokenizer).expect("it encodes by words");
    let ends = PieceEnds::of(&words, &tokenizer).expect("it cuts text");
    let seed = fastrand::u64(..);
    let mut draw = fastrand::Rng::with_seed(seed);
    let mut num_pieces = 0;
    for _ in 0..40 {
        let text: String = (0..draw.usize(1..6)).map(|_| text(&mut draw)).collect();
        let expected = tokenizer.encode_fast(text.as_str(), false).unwrap();
        let (mut found, mut begin) = (Vec::new(), 0);
        loop {
            // Only a part of what follows is known.
            let known = begin + draw.usize(0..=text.len() - begin);
            let known = &text[begin..text.ceil_char_boundary(known)];
            let least = draw.usize(0..40);
            let end = ends.find(known, least.min(known.len())).unwrap();
            let end = end.map_or(text.len(), |end| begin + end);
            let piece = &text[begin..end];
            found.extend(words.encode(&tokenizer, piece, begin > 0).unwrap());
            num_pieces += 1;
            begin = end;
            if begin == text.len() {
                break;
            }
        }
        assert!(found == expected.get_ids(), "seed {seed}: {text:?}");
    }
    num_pieces
}

#[rstest]
#[case::gpt2("byte-level", json!({}))]
#[case::llama3("llama3", json!({}))]
#[case::qwen2("byte-level", json!({"pre_tokenizer": split(&[QWEN2]), "normalizer": {"type": "NFC"}}))]
#[case::o200k("llama3", json!({"pre_tokenizer": split(&[O200K])}))]
#[case::deepseek("byte-level", json!({"pre_tokenizer": split(&DEEPSEEK)}))]
#[case::gpt_neox("byte-level", json!({"normalizer": {"type": "NFKD"}}))]
#[case::llama2("llama2", json!({}))]
#[case::mistral("mistral", json!({}))]
#[case::space_added_to_each_part(
    "mistral",
    json!({"pre_tokenizer": {
        "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false
    }})
)]
#[case::added_tokens(
    "byte-level",
    json!({
        "normalizer": {"type": "NFKC"},
        "added_tokens": added(&[("<both>", true), ("th>e", false)], true)["added_tokens"],
    })
)]
#[case::added_to_raw_text("byte-level", added(&[("<both>", false), (" > ", true), ("  ", false)], false))]
#[case::added_to_mistral("mistral", added(&[("<both>", true), ("<both>er", false), ("th>e", false)], true))]
fn pieces_have_the_ids_of_the_whole_text(
    #[case] name: &str,
    #[case] parts: Value,
    #[values(false, true)] is_special: bool,
) {
    let num_pieces = compare_pieces(tokenizer(name, &parts), is_special);
    assert!(num_pieces > 44, "only {num_pieces} pieces of 40 texts");
}

#[test]
fn one_word_of_any_size_is_no_piece() {
    let whole = tokenizer("byte-level", &json!({"pre_tokenizer": byte_level(false)}));
    let words = Words::of(&whole).unwrap();
    assert!(PieceEnds::of(&words, &whole).is_none());
    let gpt2 = tokenizer("byte-level", &json!({}));
    let words = Words::of(&gpt2).unwrap();
    let ends = PieceEnds::of(&words, &gpt2).unwrap();
    assert_eq!(ends.find(&"a".repeat(10_000), 10).unwrap(), None);
    assert_eq!(ends.find(&" \n\t".repeat(10_000), 10).unwrap(), None);
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
