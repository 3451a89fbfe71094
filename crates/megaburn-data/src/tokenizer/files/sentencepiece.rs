use std::path::Path;

use tokenizers::AddedToken;

use super::{
    super::{
        beside,
        encoder::{Encoder, EncoderDecoder, EncoderModel, EncoderNormalizer},
        merges::{MergeOptions, Merges},
        sentencepiece::{
            Kind, ModelType, PieceDecoder, PieceNormalizer, SentencePieceModel, Unigram,
            user_defined,
        },
        special::{OwnIds, read_json},
        t5,
        unknown::Unknown,
        vocabulary::Vocabulary,
    },
    FileKind, Opened,
};
use crate::error::DataError;

/// Reads a SentencePiece model. A prompt is divided at its control tokens and at the tokens that
/// the files next to it add; each part is encoded as SentencePiece encodes a text.
pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Opened, DataError> {
    let bad = |why: String| DataError::BadTokenizer {
        path: path.into(),
        why,
    };
    let model = SentencePieceModel::parse(bytes).map_err(bad)?;
    let mut vocabulary = Vocabulary::default();
    let mut special = Vec::new();
    for (id, piece) in (0..).zip(&model.pieces) {
        if !vocabulary.insert(&piece.text, id) {
            return Err(bad(format!(
                "its token {id}, {:?}, occurs twice",
                piece.text
            )));
        }
        if matches!(piece.kind, Kind::Control | Kind::Unknown) {
            special.push(AddedToken::from(piece.text.as_str(), true).normalized(false));
        }
    }
    let (unknown_name, unknown) = unknown(&model).map_err(bad)?;
    let mut added = beside::added_tokens(path)?;
    let is_t5 = t5::is_t5(path, &added)?;
    if is_t5 {
        t5::add_sentinels(path, model.pieces.len(), &mut added)?;
    }
    // They are found in the text as it is given, so that each part is normalized on its own.
    added
        .iter_mut()
        .for_each(|added| added.token.normalized = false);
    beside::add_ids(path, &mut vocabulary, &added)?;
    let config = read_json(&path.with_file_name("tokenizer_config.json"))?;
    let first_only = !is_t5 && config["legacy"] == false;
    let normalizer = PieceNormalizer::new(&model, first_only).map_err(bad)?;
    let decoder = PieceDecoder::new(&model, unknown_name);
    let id = |id: i32| {
        u32::try_from(id)
            .ok()
            .filter(|&id| (id as usize) < model.pieces.len())
    };
    let own = OwnIds {
        eos: id(model.eos),
        bos: id(model.bos),
        pad: id(model.pad),
    };
    let model = match model.model_type {
        ModelType::Unigram => EncoderModel::Unigram(Unigram::new(&model, vocabulary, unknown)),
        ModelType::Bpe => EncoderModel::Merges(merges(&model, vocabulary, unknown)),
    };
    let mut encoder = Encoder::new(model);
    encoder.with_decoder(Some(EncoderDecoder::Pieces(decoder)));
    encoder
        .with_normalizer(Some(EncoderNormalizer::Pieces(normalizer)))
        .and_then(|encoder| encoder.add_tokens(special))
        .and_then(|_| encoder.add_tokens(added.into_iter().map(|added| added.token)))
        .map_err(|error| bad(error.to_string()))?;
    Ok(Opened {
        kind: if is_t5 {
            FileKind::T5
        } else {
            FileKind::SentencePiece
        },
        encoder,
        own,
        settings: config["legacy"].to_string(),
        encoding: None,
    })
}

/// The spelling of the unknown token, and what unknown characters become.
fn unknown(model: &SentencePieceModel) -> Result<(&str, Unknown), String> {
    let mut unknown = None;
    let mut bytes = [None; 256];
    for (id, piece) in (0..).zip(&model.pieces) {
        match piece.kind {
            Kind::Unknown if unknown.is_some() => return Err("it has two unknown tokens".into()),
            Kind::Unknown => unknown = Some((id, piece.text.as_str())),
            Kind::Byte => match piece.byte() {
                Some(byte) => bytes[usize::from(byte)] = Some(id),
                None => {
                    return Err(format!(
                        "its token {id}, {:?}, stands for no byte",
                        piece.text
                    ));
                }
            },
            _ => {}
        }
    }
    let (id, name) = unknown.ok_or("it has no unknown token")?;
    if !model.byte_fallback {
        return Ok((name, Unknown::Token(id)));
    }
    let ids: Option<Vec<u32>> = bytes.into_iter().collect();
    let ids = ids.and_then(|ids| <Box<[u32; 256]>>::try_from(ids).ok());
    let ids =
        ids.ok_or("it encodes unknown characters as bytes, but has no tokens for all 256 bytes")?;
    Ok((name, Unknown::Bytes(ids)))
}

fn merges(model: &SentencePieceModel, vocabulary: Vocabulary, unknown: Unknown) -> Merges {
    let is_piece = |kind| matches!(kind, Kind::Normal | Kind::UserDefined | Kind::Unused);
    let pieces = (0..)
        .zip(&model.pieces)
        .filter(|(_, piece)| is_piece(piece.kind));
    let pieces = pieces.map(|(id, piece)| (piece.text.as_str().into(), id));
    let kinds = model.pieces.iter().map(|piece| piece.kind);
    let options = MergeOptions {
        whole: user_defined(model),
        whole_parts: false,
        unused: kinds.map(|kind| kind == Kind::Unused).collect(),
        unknown,
    };
    let scores = model.pieces.iter().map(|piece| piece.score).collect();
    Merges::new(vocabulary, pieces, scores, options)
}
