//! The tokenizer of the `tokenizers` crate, over its own parts and those of
//! [`super::sentencepiece`] and [`super::merges`].

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Deserializer};
use tokenizers::{
    Decoder, DecoderWrapper, Model, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper,
    PostProcessorWrapper, PreTokenizerWrapper, Result, Token, TokenizerImpl,
    models::{TrainerWrapper, bpe::BpeTrainer},
};

use super::{
    merges::Merges,
    sentencepiece::{PieceDecoder, PieceNormalizer, Unigram},
};

/// Finds added tokens in a text, normalizes and divides the rest, and encodes the parts.
pub(super) type Encoder = TokenizerImpl<
    EncoderModel,
    EncoderNormalizer,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    EncoderDecoder,
>;

/// Encodes one part of a text.
#[derive(Clone, Debug)]
pub(super) enum EncoderModel {
    /// A model of the `tokenizers` crate.
    Library(ModelWrapper),
    /// Merges by rank: SentencePiece's BPE, and tiktoken's.
    Merges(Merges),
    /// SentencePiece's unigram model.
    Unigram(Unigram),
}

/// Changes the characters of a text before it is divided.
#[derive(Clone, Debug)]
pub(super) enum EncoderNormalizer {
    /// A normalizer of the `tokenizers` crate.
    Library(NormalizerWrapper),
    /// The normalizer of a SentencePiece model.
    Pieces(PieceNormalizer),
}

/// Joins the spellings of tokens to a text.
#[derive(Clone, Debug)]
pub(super) enum EncoderDecoder {
    /// A decoder of the `tokenizers` crate.
    Library(DecoderWrapper),
    /// The decoder of a SentencePiece model.
    Pieces(PieceDecoder),
}

impl Model for EncoderModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, sequence: &str) -> Result<Vec<Token>> {
        match self {
            Self::Library(model) => model.tokenize(sequence),
            Self::Merges(model) => Ok(model.encode(sequence)),
            Self::Unigram(model) => Ok(model.encode(sequence)),
        }
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Library(model) => model.token_to_id(token),
            Self::Merges(model) => model.vocabulary().id(token),
            Self::Unigram(model) => model.vocabulary().id(token),
        }
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            Self::Library(model) => model.id_to_token(id),
            Self::Merges(model) => model.vocabulary().token(id),
            Self::Unigram(model) => model.vocabulary().token(id),
        }
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        match self {
            Self::Library(model) => model.get_vocab(),
            Self::Merges(model) => model.vocabulary().ids(),
            Self::Unigram(model) => model.vocabulary().ids(),
        }
    }

    fn get_vocab_size(&self) -> usize {
        match self {
            Self::Library(model) => model.get_vocab_size(),
            Self::Merges(model) => model.vocabulary().len(),
            Self::Unigram(model) => model.vocabulary().len(),
        }
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> Result<Vec<PathBuf>> {
        match self {
            Self::Library(model) => model.save(folder, prefix),
            _ => Err("the file that the model was read from is its only form".into()),
        }
    }

    fn get_trainer(&self) -> TrainerWrapper {
        match self {
            Self::Library(model) => model.get_trainer(),
            _ => BpeTrainer::default().into(),
        }
    }
}

impl Normalizer for EncoderNormalizer {
    fn normalize(&self, text: &mut NormalizedString) -> Result<()> {
        match self {
            Self::Library(normalizer) => normalizer.normalize(text),
            Self::Pieces(normalizer) => {
                let is_first = text.offsets_original().0 == 0;
                *text = normalizer.normalize(text.get(), is_first).into();
                Ok(())
            }
        }
    }
}

impl Decoder for EncoderDecoder {
    fn decode_chain(&self, tokens: Vec<String>) -> Result<Vec<String>> {
        match self {
            Self::Library(decoder) => decoder.decode_chain(tokens),
            Self::Pieces(decoder) => Ok(vec![decoder.decode(&tokens)]),
        }
    }
}

impl<'de> Deserialize<'de> for EncoderModel {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        ModelWrapper::deserialize(from).map(Self::Library)
    }
}

impl<'de> Deserialize<'de> for EncoderNormalizer {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        NormalizerWrapper::deserialize(from).map(Self::Library)
    }
}

impl<'de> Deserialize<'de> for EncoderDecoder {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        DecoderWrapper::deserialize(from).map(Self::Library)
    }
}
