use std::path::PathBuf;

use clap::Args;
use megaburn_data::IndexedDataset;
use megaburn_train::{TrainError, config::Tokenizer};
use serde_json::Value;

use super::{super::print, counted, failed};

/// Number of tokens of a document that are shown.
const SHOWN: usize = 64;

#[derive(Args)]
pub(in crate::cli) struct InspectArgs {
    /// The path of the data set, without .bin and .idx.
    #[arg(value_name = "PREFIX")]
    prefix: PathBuf,
    /// Also show the tokens of this document, counted from 0. Repeatable.
    #[arg(long, value_name = "N")]
    document: Vec<u64>,
    /// Show the text of documents with this tokenizer: `byte`, a tokenizer.json, or a folder that
    /// holds one.
    #[arg(long, value_name = "TOKENIZER")]
    tokenizer: Option<String>,
}

impl InspectArgs {
    pub(super) fn run(self) -> Result<(), TrainError> {
        let set = IndexedDataset::open(&self.prefix).map_err(failed)?;
        set.check().map_err(failed)?;
        print::result(format!(
            "{}, {}, {}",
            counted(set.num_documents(), "document"),
            counted(set.num_sequences(), "sequence"),
            counted(set.num_tokens(), "token"),
        ))?;
        let name = set.token_type().name();
        let size = set.num_tokens() * set.token_type().size();
        print::result(format!("tokens   {name}, {size} bytes"))?;
        if let Some(description) = set.description() {
            let field = |name: &str| match &description[name] {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let (command, writer) = (field("command"), field("written_by"));
            print::result(format!("written  by {writer}, data {command}"))?;
            for name in [
                "inputs",
                "from",
                "field",
                "append_eod",
                "plain_text",
                "split_sentences",
                "tokenizer",
            ] {
                if !description[name].is_null() {
                    print::result(format!("         {name} {}", field(name)))?;
                }
            }
        }
        let tokenizer = self.tokenizer.map(|name| Tokenizer::from(name).open());
        let tokenizer = tokenizer.transpose().map_err(failed)?;
        for index in self.document {
            let sequences = set.document(index).map_err(failed)?;
            let count = sequences.iter().map(Vec::len).sum::<usize>() as u64;
            print::result(format!(
                "document {index}: {} in {}",
                counted(count, "token"),
                counted(sequences.len() as u64, "sequence"),
            ))?;
            for tokens in sequences {
                print::result(format!("  {}", shown(&tokens)))?;
                if let Some(tokenizer) = &tokenizer {
                    let ids = tokens.iter().filter_map(|token| u32::try_from(*token).ok());
                    let text = tokenizer.decode(&ids.collect::<Vec<_>>());
                    print::result(format!("  {text:?}"))?;
                }
            }
        }
        Ok(())
    }
}

/// The first tokens, and how many follow.
fn shown(tokens: &[i64]) -> String {
    let first = tokens.iter().take(SHOWN).map(i64::to_string);
    let mut text = first.collect::<Vec<_>>().join(" ");
    if tokens.len() > SHOWN {
        text += &format!(" and {} more", tokens.len() - SHOWN);
    }
    text
}
