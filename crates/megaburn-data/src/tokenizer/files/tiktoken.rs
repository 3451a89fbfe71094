use std::path::Path;

use serde_json::{Value, json};
use tokenizers::{AddedToken, DecoderWrapper, PreTokenizerWrapper};

use super::{
    super::{
        beside::{self, Added},
        encoder::{Encoder, EncoderDecoder, EncoderModel},
        merges::{MergeOptions, Merges},
        special::{OwnIds, read_json},
        vocabulary::Vocabulary,
    },
    FileKind, Opened,
    tiktoken_encodings::{ENCODINGS, Encoding},
};
use crate::error::DataError;

const CONFIG: &str = "tokenizer_config.json";
/// A file cannot have more ranks; a greater one is a mistake.
const MOST_RANKS: u32 = 1 << 24;

/// Whether the first line is one of a rank file: a token in base64 and its rank.
pub(super) fn is_rank_file(bytes: &[u8]) -> bool {
    let first = bytes.split(|&byte| byte == b'\n').next();
    first.is_some_and(|line| line.len() < 4096 && rank(line).is_ok())
}

/// Reads a rank file: a line for each token, with its bytes in base64 and its rank.
pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Opened, DataError> {
    let bad = |why: String| DataError::BadTokenizer {
        path: path.into(),
        why,
    };
    let mut vocabulary = Vocabulary::default();
    let mut pieces: Vec<(Box<str>, u32)> = Vec::new();
    let mut num_bytes = 0;
    for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let number = index + 1;
        let (token, rank) = rank(line).map_err(|why| bad(format!("line {number} {why}")))?;
        num_bytes += usize::from(token.len() == 1);
        let token = spelling(&token);
        if !vocabulary.insert(&token, rank) {
            return Err(bad(format!(
                "line {number} has a token or a rank ({rank}) of an earlier line"
            )));
        }
        pieces.push((token.into(), rank));
    }
    if num_bytes != 256 {
        return Err(bad(format!(
            "it has ranks for {num_bytes} of the 256 bytes: the file was cut"
        )));
    }
    let encoding = encoding(path, pieces.len())?;
    let mut added = beside::added_tokens(path)?;
    added
        .iter_mut()
        .for_each(|added| added.token.normalized = false);
    let own = if added.iter().all(|added| added.id.is_none()) && pieces.len() == encoding.num_ranks
    {
        encoding.special_tokens()
    } else {
        Vec::new()
    };
    let own = own.into_iter().map(|(name, id)| Added {
        id: Some(id),
        token: AddedToken::from(name, true).normalized(false),
        file: CONFIG,
    });
    let mut all: Vec<Added> = own.collect();
    for added in added {
        if !all
            .iter()
            .any(|own| own.token.content == added.token.content)
        {
            all.push(added);
        }
    }
    beside::add_ids(path, &mut vocabulary, &all)?;
    let own = |name: &str| vocabulary.id(name).filter(|_| !name.is_empty());
    let own = OwnIds {
        eos: own(encoding.eos),
        bos: own(encoding.bos),
        pad: None,
    };
    let scores = (0..vocabulary.len()).map(|rank| -(rank as f32)).collect();
    let options = MergeOptions {
        whole_parts: true,
        ..MergeOptions::default()
    };
    let mut encoder = Encoder::new(EncoderModel::Merges(Merges::new(
        vocabulary, pieces, scores, options,
    )));
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
    });
    let split = json!({
        "type": "Split", "pattern": {"Regex": encoding.pattern}, "behavior": "Isolated", "invert": false,
    });
    let parts = json!({"type": "Sequence", "pretokenizers": [split, byte_level]});
    let parts: PreTokenizerWrapper =
        serde_json::from_value(parts).map_err(|error| bad(error.to_string()))?;
    let decoder: DecoderWrapper =
        serde_json::from_value(byte_level).map_err(|error| bad(error.to_string()))?;
    encoder.with_pre_tokenizer(Some(parts));
    encoder.with_decoder(Some(EncoderDecoder::Library(decoder)));
    let tokens = all.into_iter().map(|added| added.token);
    encoder
        .add_tokens(tokens)
        .map_err(|error| bad(error.to_string()))?;
    Ok(Opened {
        kind: FileKind::Tiktoken,
        encoder,
        own,
        settings: encoding.pattern.into(),
        encoding: Some(encoding.name),
    })
}

/// The encoding that the files next to it, its name or its number of ranks say, in this order.
fn encoding(path: &Path, num_ranks: usize) -> Result<&'static Encoding, DataError> {
    let config = read_json(&path.with_file_name(CONFIG))?;
    let model = read_json(&path.with_file_name("config.json"))?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let names = || {
        let all: Vec<&str> = ENCODINGS.iter().map(|encoding| encoding.name).collect();
        all.join(", ")
    };
    if let Some(name) = config["tiktoken_encoding"].as_str() {
        let found = ENCODINGS.iter().find(|encoding| encoding.name == name);
        return found.ok_or_else(|| DataError::BadTokenizer {
            path: path.with_file_name(CONFIG),
            why: format!("tiktoken_encoding is {name:?}; give one of {}", names()),
        });
    }
    let (class, model) = (text(&config["tokenizer_class"]), text(&model["model_type"]));
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let said = |encoding: &&Encoding| encoding.classes.contains(&class.as_str());
    let of_model = |encoding: &&Encoding| encoding.models.contains(&model.as_str());
    let named = |encoding: &&Encoding| encoding.name == stem;
    let sized = |encoding: &&Encoding| encoding.num_ranks == num_ranks;
    let all = || ENCODINGS.iter();
    let found = all().find(said).or_else(|| all().find(of_model));
    let found = found
        .or_else(|| all().find(named))
        .or_else(|| all().find(sized));
    found.ok_or_else(|| DataError::BadTokenizer {
        path: path.into(),
        why: format!(
            "a file of ranks does not say how texts are divided, and neither the files next to it, \
            its name, nor its {num_ranks} ranks do; write \"tiktoken_encoding\" into a {CONFIG} next \
            to it, with one of {}",
            names()
        ),
    })
}

/// The token and the rank of a line.
fn rank(line: &[u8]) -> Result<(Vec<u8>, u32), String> {
    let line = line.trim_ascii();
    let space = line.iter().position(|&byte| byte == b' ');
    let (token, rank) = line
        .split_at(space.ok_or("has no rank: it must be a token in base64, a space and a number")?);
    let rank = std::str::from_utf8(&rank[1..])
        .ok()
        .and_then(|rank| rank.parse().ok());
    let rank = rank.filter(|&rank: &u32| rank < MOST_RANKS);
    let rank = rank.ok_or("has a rank that is no number below 16777216")?;
    let token = base64(token).ok_or("has a token that is not base64")?;
    Ok((token, rank))
}

/// The bytes that are written in base64, with padding (RFC 4648).
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text
        .strip_suffix(b"==")
        .or(text.strip_suffix(b"="))
        .unwrap_or(text);
    if digits.is_empty() || !text.len().is_multiple_of(4) || digits.len() % 4 == 1 {
        return None;
    }
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    let (mut bits, mut num_bits) = (0_u32, 0);
    for &digit in digits {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6 | u32::from(value)) & 0xFFFF;
        num_bits += 6;
        if num_bits >= 8 {
            num_bits -= 8;
            bytes.push((bits >> num_bits) as u8);
        }
    }
    Some(bytes)
}

/// The bytes as characters of the byte-level alphabet of GPT-2, in which printable bytes of
/// Latin-1 are themselves and the others follow from U+0100.
fn spelling(bytes: &[u8]) -> String {
    let is_printable = |byte: &u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let char = |byte: &u8| {
        if is_printable(byte) {
            return char::from(*byte);
        }
        let before = (0..*byte).filter(|byte| !is_printable(byte)).count();
        char::from_u32(0x100 + before as u32).unwrap_or_default()
    };
    bytes.iter().map(char).collect()
}
