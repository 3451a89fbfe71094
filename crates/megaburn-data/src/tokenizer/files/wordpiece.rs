use std::{collections::HashMap, path::Path, str::from_utf8};

use serde_json::{Value, json};
use tokenizers::{
    AddedToken, DecoderWrapper, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper,
};

use super::{
    super::{
        beside,
        encoder::{Encoder, EncoderDecoder, EncoderModel, EncoderNormalizer},
        special::{OwnIds, read_json},
    },
    FileKind, Opened,
};
use crate::error::DataError;

const CONFIG: &str = "tokenizer_config.json";
/// The classes of tokenizers that read the file as it is read here.
const CLASSES: [&str; 2] = ["BertTokenizer", "BertTokenizerFast"];
/// Whether a token of the vocabulary is one that T5 needs besides BERT's: a sentinel, or the
/// beginning or the end of the decoder's text, as in Megatron-LM. Prompts spell them out.
pub(in super::super) fn is_of_t5(token: &str) -> bool {
    let is_sentinel = token.starts_with("<extra_id_") && token.ends_with('>');
    is_sentinel || ["[BOS]", "[EOS]"].contains(&token)
}

/// Reads BERT's `vocab.txt`, which has a token a line. `tokenizer_config.json` says whether texts
/// are written in lower case (`do_lower_case`, else yes), lose accents (`strip_accents`, else if
/// they are in lower case), and are divided at Chinese characters (`tokenize_chinese_chars`, else
/// yes).
///
/// Source: Devlin et al. 2019, "BERT"; transformers `models/bert/tokenization_bert.py`.
pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Opened, DataError> {
    let bad = |why: String| DataError::BadTokenizer {
        path: path.into(),
        why,
    };
    let text = from_utf8(bytes)
        .map_err(|error| bad(format!("byte {} is not UTF-8", error.valid_up_to())))?;
    let tokens = text.strip_suffix('\n').unwrap_or(text).split('\n');
    let tokens = tokens.map(|token| token.strip_suffix('\r').unwrap_or(token).to_string());
    let vocabulary: HashMap<String, u32> = tokens.zip(0..).collect();
    let config = read_json(&path.with_file_name(CONFIG))?;
    if let Some(class) = config["tokenizer_class"].as_str()
        && !CLASSES.contains(&class)
    {
        return Err(DataError::BadTokenizer {
            path: path.with_file_name(CONFIG),
            why: format!(
                "it names the class {class}, but a vocab.txt is read as one of {}; give its \
                tokenizer.json instead",
                CLASSES.join(", ")
            ),
        });
    }
    let names = read_json(&path.with_file_name("special_tokens_map.json"))?;
    let name = |key: &str, usual: &str| {
        let said = [&config, &names]
            .into_iter()
            .find_map(|file| spelling(&file[key]));
        said.unwrap_or(usual).to_string()
    };
    let special = [
        name("unk_token", "[UNK]"),
        name("sep_token", "[SEP]"),
        name("pad_token", "[PAD]"),
        name("cls_token", "[CLS]"),
        name("mask_token", "[MASK]"),
    ];
    let [unknown, sep, pad, cls, _] = &special;
    let id = |token: &String| {
        let id = vocabulary.get(token).copied();
        id.ok_or_else(|| {
            bad(format!(
                "it has no token {token:?}: the file was cut, or is no vocabulary of BERT"
            ))
        })
    };
    id(unknown)?;
    let (sep, cls) = (id(sep)?, id(cls)?);
    let own = OwnIds {
        eos: Some(sep),
        bos: Some(cls),
        pad: vocabulary.get(pad).copied(),
    };
    let flag = |key: &str, usual: Value| match &config[key] {
        Value::Null => usual,
        said => said.clone(),
    };
    let normalizer = json!({
        "type": "BertNormalizer",
        "clean_text": true,
        "handle_chinese_chars": flag("tokenize_chinese_chars", true.into()),
        "strip_accents": flag("strip_accents", Value::Null),
        "lowercase": flag("do_lower_case", true.into()),
    });
    let settings = normalizer.to_string();
    let normalizer: NormalizerWrapper = serde_json::from_value(normalizer).map_err(|error| DataError::BadTokenizer {
        path: path.with_file_name(CONFIG),
        why: format!("one of do_lower_case, strip_accents, tokenize_chinese_chars is not true or false ({error})"),
    })?;
    let part = |value: Value| serde_json::from_value::<PreTokenizerWrapper>(value);
    let parts =
        part(json!({"type": "BertPreTokenizer"})).map_err(|error| bad(error.to_string()))?;
    let decoder = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    let decoder: DecoderWrapper =
        serde_json::from_value(decoder).map_err(|error| bad(error.to_string()))?;
    let model = json!({
        "type": "WordPiece",
        "unk_token": unknown,
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": vocabulary,
    });
    let model: ModelWrapper =
        serde_json::from_value(model).map_err(|error| bad(error.to_string()))?;
    let mut encoder = Encoder::new(EncoderModel::Library(model));
    encoder.with_pre_tokenizer(Some(parts));
    encoder.with_decoder(Some(EncoderDecoder::Library(decoder)));
    let added = beside::added_tokens(path)?;
    let of_t5 = text.lines().filter(|token| is_of_t5(token));
    let special = special
        .iter()
        .map(String::as_str)
        .chain(of_t5)
        .map(|token| AddedToken::from(token, true));
    encoder
        .with_normalizer(Some(EncoderNormalizer::Library(normalizer)))
        .and_then(|encoder| encoder.add_tokens(added.iter().map(|added| added.token.clone())))
        .and_then(|_| encoder.add_tokens(special))
        .map_err(|error| bad(error.to_string()))?;
    let other = added
        .iter()
        .find(|added| added.id.is_some() && added.id != encoder.token_to_id(&added.token.content));
    if let Some(added) = other {
        return Err(DataError::BadTokenizer {
            path: path.with_file_name(added.file),
            why: format!(
                "it gives {:?} an id that does not follow those of vocab.txt",
                added.token.content
            ),
        });
    }
    beside::with_template(path, &mut encoder, &[cls], &[sep])?;
    Ok(Opened {
        kind: FileKind::WordPiece,
        encoder,
        own,
        settings,
        encoding: None,
    })
}

fn spelling(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}
