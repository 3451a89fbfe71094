//! `megaburn tokenize`: trains a tokenizer.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use megaburn_data::{Corpus, DataError, TokenDataset, Tokenizer, TokenizerTrainer};
use megaburn_train::{Exit, TrainError};

use super::{burn_sources::burn_sources, print};

#[derive(Args)]
pub(super) struct TokenizeArgs {
    /// Text to train on (plain, or JSON in a .jsonl, .ndjson or .json file). Repeatable. Default:
    /// the sources of the Burn crates, as for training.
    #[arg(long, value_name = "FILE")]
    data: Vec<PathBuf>,
    /// Number of token ids, including 256 bytes and the special tokens.
    #[arg(long, value_name = "N")]
    vocab: usize,
    /// Output: a folder, or a file that ends in `.json`.
    #[arg(long, value_name = "DIR_OR_FILE")]
    out: PathBuf,
    /// An additional special token, next to those that start, end and pad a text. Repeatable.
    #[arg(long, value_name = "TOKEN")]
    special: Vec<String>,
    /// Overwrite an existing tokenizer.
    #[arg(long)]
    force: bool,
}

impl TokenizeArgs {
    /// Trains and writes the tokenizer; prints errors. Returns the exit code.
    pub(super) fn run(self) -> ExitCode {
        match self.start() {
            Ok(()) => Exit::Done.into(),
            Err(error) => {
                print::error(&error);
                match error {
                    DataError::Write { .. } => Exit::Failed.into(),
                    error => TrainError::from(error).exit().into(),
                }
            }
        }
    }

    fn start(self) -> Result<(), DataError> {
        let corpus = corpus(&self.data)?;
        let note = corpus
            .note()
            .map(|note| format!(" ({note})"))
            .unwrap_or_default();
        print::note(format!("data     {corpus}{note}"));
        let trainer = TokenizerTrainer::new(self.vocab).with_special_tokens(self.special);
        let trained = trainer.train(&corpus)?;
        let tokens = TokenDataset::new(&corpus, trained.tokenizer())?;
        let found = trained.tokenizer().vocab_size();
        let fewer = match self.vocab {
            asked if asked > found => {
                format!("; no more pairs of tokens repeat, {asked} were requested")
            }
            _ => String::new(),
        };
        print::note(format!("vocab    {found} tokens{fewer}"));
        let bytes = tokens.bytes_per_token().unwrap_or_default();
        print::note(format!(
            "text     {} tokens, {bytes:.3} bytes per token",
            tokens.num_tokens()
        ));
        let path = trained.save(&self.out, self.force)?;
        print::note(format!("wrote    {}", path.display()));
        print::note(format!(
            "train    megaburn train --set data.tokenizer={}{}",
            shown(&path),
            flag(&self.data)
        ));
        Ok(())
    }
}

/// The documents of all files, or the default text.
fn corpus(files: &[PathBuf]) -> Result<Corpus, DataError> {
    match files {
        [] => burn_sources(),
        [file] => Corpus::from_file(file),
        files => {
            let mut documents = Vec::new();
            for file in files {
                documents.extend_from_slice(Corpus::from_file(file)?.documents());
            }
            Corpus::from_documents(format!("{} files", files.len()), documents)
        }
    }
}

/// A path, quoted for a shell if necessary.
fn shown(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-".contains(c);
    if text.chars().all(plain) {
        text
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

/// The flag for training on the same text, which is possible with one file only.
fn flag(files: &[PathBuf]) -> String {
    match files {
        [file] => format!(" --data {}", shown(file)),
        _ => String::new(),
    }
}
