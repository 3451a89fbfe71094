//! Encodes and decodes with a tokenizer of a published model.

use super::{
    PieceEncoder, PublishedTokenizer, TextStream, Tokenizer,
    files::FileKind,
    hf::HfTokenizer,
    hf_pieces::HfPieces,
    stream::{HfStream, decode},
    transformers,
};
use crate::error::DataError;

impl Tokenizer for HfTokenizer {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let ids = self.ids(text, self.plain.encode(text))?;
        Ok(self.without_reserved(ids))
    }

    fn encode_batch(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, DataError> {
        self.encode_parts(texts, |text| self.encode(text))
    }

    fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.ids(text, self.prompt().encode_with_template(text))
    }

    fn encode_bare_prompt(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.ids(text, self.prompt().encode(text))
    }

    fn check_prompts(&self) -> Result<(), DataError> {
        match self.kind {
            FileKind::Json => {
                let unknown = self.unknown.as_deref();
                let encoder = &self.prompt().encoder;
                transformers::check(&self.path, encoder, unknown, self.template()?)
            }
            _ => Ok(()),
        }
    }

    fn encode_prompts(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, DataError> {
        let Some([before, after]) = self.template()? else {
            return texts.iter().map(|text| self.encode_prompt(text)).collect();
        };
        let mut encoded =
            self.encode_parts(texts, |text| self.ids(text, self.prompt().encode(text)))?;
        for ids in &mut encoded {
            ids.splice(..0, before.iter().copied());
            ids.extend(after);
        }
        Ok(encoded)
    }

    fn pieces(&self, are_prompts: bool) -> Option<Box<dyn PieceEncoder + '_>> {
        Some(Box::new(HfPieces::of(self, are_prompts)?))
    }

    fn encoding_memory(&self, num_bytes: usize, longest_word: usize) -> usize {
        self.prompt().memory(num_bytes, longest_word)
    }

    fn decode(&self, tokens: &[u32]) -> String {
        decode(&self.plain.encoder, tokens)
    }

    fn stream(&self) -> Box<dyn TextStream + '_> {
        Box::new(HfStream::new(&self.plain.encoder))
    }

    fn eos(&self) -> u32 {
        self.special.eos
    }

    fn bos(&self) -> Option<u32> {
        self.special.bos
    }

    fn pad(&self) -> Option<u32> {
        self.special.pad
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.plain.encoder.token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.plain.encoder.id_to_token(id)
    }

    fn is_special(&self, id: u32) -> bool {
        let added = self.plain.encoder.get_added_vocabulary();
        let token = added.get_added_tokens_decoder().get(&id);
        self.is_reserved(id) || token.is_some_and(|token| token.special)
    }

    fn published(&self) -> Result<Option<PublishedTokenizer>, DataError> {
        self.as_published().map(Some)
    }

    fn hash(&self) -> u64 {
        self.hash
    }

    fn prompt_hash(&self) -> u64 {
        self.prompt_hash
    }
}
