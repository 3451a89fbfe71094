use std::path::Path;

use megaburn_data::{ByteTokenizer, DataError, HfTokenizer};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::require::require;
use crate::error::TrainError;

/// The tokenizer, which turns text into tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
#[derive(JsonSchema)]
pub enum Tokenizer {
    /// `byte`: each byte is a token.
    #[default]
    Byte,
    /// The path of a `tokenizer.json`, or of a folder that holds one.
    File(String),
}

impl From<String> for Tokenizer {
    fn from(text: String) -> Self {
        if text == "byte" {
            Self::Byte
        } else {
            Self::File(text)
        }
    }
}

impl From<Tokenizer> for String {
    fn from(tokenizer: Tokenizer) -> Self {
        match tokenizer {
            Tokenizer::Byte => "byte".into(),
            Tokenizer::File(path) => path,
        }
    }
}

impl Tokenizer {
    /// Opens the tokenizer.
    ///
    /// # Errors
    /// There is no tokenizer at the path, or it cannot be used.
    pub fn open(&self) -> Result<Box<dyn megaburn_data::Tokenizer>, DataError> {
        Ok(match self {
            Self::Byte => Box::new(ByteTokenizer),
            Self::File(path) => Box::new(HfTokenizer::open(path)?),
        })
    }

    /// Refuses a bare word that is not a file: it was probably meant as the name of a kind of
    /// tokenizer. Other paths are checked when they are opened, so a recipe may name a file that
    /// does not exist yet.
    pub(super) fn validate(&self) -> Result<(), TrainError> {
        let Self::File(path) = self else {
            return Ok(());
        };
        let is_path = path.contains(['/', '\\', '.']) || Path::new(path).exists();
        let value = if path.is_empty() { "empty" } else { path };
        let rule = "`byte`, or the path of a tokenizer.json or of a folder that contains one";
        require(is_path, "data.tokenizer", value, rule)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::Tokenizer;
    use crate::config::ConfigLayers;

    #[rstest]
    #[case("byte", Tokenizer::Byte)]
    #[case("'byte'", Tokenizer::Byte)]
    #[case("runs/bpe", Tokenizer::File("runs/bpe".into()))]
    #[case("tokenizer.json", Tokenizer::File("tokenizer.json".into()))]
    #[case("./byte", Tokenizer::File("./byte".into()))]
    #[case("src", Tokenizer::File("src".into()))] // this crate has a folder of this name
    fn a_tokenizer_is_byte_or_a_path(#[case] text: &str, #[case] expected: Tokenizer) {
        let layers = ConfigLayers::new().with_set(&format!("data.tokenizer={text}"));
        let config = layers.and_then(ConfigLayers::load).unwrap();
        assert_eq!(config.data.tokenizer, expected);
        let again = ConfigLayers::new()
            .with_text("saved", &config.to_toml())
            .unwrap();
        assert_eq!(again.load().unwrap(), config);
    }

    #[test]
    fn a_path_without_a_tokenizer_is_named_when_it_is_opened() {
        let error = Tokenizer::File("no/such".into())
            .open()
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "no tokenizer at `no/such`: no such file or folder; give a tokenizer.json, tokenizer.model, *.tiktoken or vocab.txt, or a folder that contains one"
        );
        assert_eq!(Tokenizer::Byte.open().unwrap().vocab_size(), 260);
    }
}
