//! Encodes text files into Megatron-LM's indexed data sets.
//!
//! Source: `tools/preprocess_data.py` of Megatron-LM.

mod array;
mod budget;
mod encode;
mod event;
mod fields;
mod inputs;
mod keys;
mod long_text;
#[cfg(feature = "parquet")]
mod parquet;
mod records;
mod rehash;
mod sentences;
#[cfg(test)]
mod tests;
mod unpack;
mod writer;

pub(crate) use inputs::is_read_as_is;

pub use event::{PreprocessCounts, PreprocessEvent, PreprocessSummary};

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{
    error::DataError,
    indexed::{TokenType, with_ending},
    part::{CompletePart, Opened, Output, Part, hex},
    tokenizer::Tokenizer,
};
use encode::{EncodedBatch, Encoder};
use fields::Keys;
use inputs::Inputs;
use writer::{Finished, Progress, Writer};

/// Bytes of text that a worker encodes at a time.
const BATCH_BYTES: usize = 1 << 18;
/// The state is saved after this time.
const SAVE_INTERVAL: Duration = Duration::from_secs(1);
/// The state is saved after this number of bytes of input.
const SAVE_BYTES: u64 = 1 << 28;

/// Encodes text files into an indexed data set.
///
/// ```
/// use megaburn_data::{ByteTokenizer, IndexedDataset, PreprocessConfig};
///
/// let dir = std::env::temp_dir().join(format!("megaburn-preprocess-{}", std::process::id()));
/// std::fs::create_dir_all(&dir).unwrap();
/// std::fs::write(dir.join("a.jsonl"), "{\"text\": \"ab\"}\n{\"text\": \"c\"}\n").unwrap();
///
/// let config = PreprocessConfig::new(vec![dir.join("a.jsonl")], dir.join("a"));
/// config.with_append_eod(true).run(&ByteTokenizer, |_| ())?;
/// let set = IndexedDataset::open(dir.join("a"))?;
/// assert_eq!(set.document(0)?, [[97, 98, 257]]);
/// # std::fs::remove_dir_all(&dir).unwrap();
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PreprocessConfig {
    inputs: Vec<PathBuf>,
    out: PathBuf,
    keys: Keys,
    append_eod: bool,
    plain_text: bool,
    split_sentences: bool,
    skip_bad: bool,
    num_workers: usize,
    force: bool,
    text_hash: bool,
    batch_bytes: usize,
    save_interval: Duration,
}

impl PreprocessConfig {
    /// Reads `inputs`, which are files, folders and patterns, and writes `OUT.bin` and `OUT.idx`.
    ///
    /// A file that ends in `.jsonl` or `.ndjson` has a JSON object per line, one in `.json` also an
    /// array of objects; the text is in the field `text`. Any other file is one document, which is
    /// encoded piece by piece if the tokenizer can ([`Tokenizer::pieces`]). All may be compressed
    /// (`.gz`, `.zst`). With the feature `parquet`, a file in `.parquet` has a document in each row,
    /// in the column `text`.
    pub fn new(inputs: Vec<PathBuf>, out: PathBuf) -> Self {
        Self {
            inputs,
            out,
            keys: Keys::Field("text".into()),
            append_eod: false,
            plain_text: false,
            split_sentences: false,
            skip_bad: false,
            num_workers: available_parallelism().map_or(1, NonZeroUsize::get),
            force: false,
            text_hash: false,
            batch_bytes: BATCH_BYTES,
            save_interval: SAVE_INTERVAL,
        }
    }

    /// Takes the text from another field; `a.b` is the field `b` of the object `a`.
    pub fn with_field(self, field: impl Into<String>) -> Self {
        let keys = Keys::Field(field.into());
        Self { keys, ..self }
    }

    /// Takes texts from several fields, and writes each into a data set of its own, which is called
    /// `OUT_KEY_document` as by Megatron-LM.
    pub fn with_json_keys(self, keys: Vec<String>) -> Self {
        let keys = Keys::Each(keys);
        Self { keys, ..self }
    }

    /// Whether to append the tokenizer's eos token to each document.
    pub fn with_append_eod(self, append_eod: bool) -> Self {
        Self { append_eod, ..self }
    }

    /// Whether special tokens that are spelled out in a text are ordinary text, and those of the
    /// tokenizer's template, such as Llama's bos, are not added ([`Tokenizer::encode`]). Default:
    /// as in `transformers` and Megatron-LM, they are recognised and added
    /// ([`Tokenizer::encode_prompt`]).
    pub fn with_plain_text(self, plain_text: bool) -> Self {
        Self { plain_text, ..self }
    }

    /// Whether each text is divided into its sentences, which become the sequences of the document,
    /// as [`BertDataset`](crate::BertDataset) and [`T5Dataset`](crate::T5Dataset) need them.
    /// Sentences end where Unicode Standard Annex 29 says, and at line breaks, and are encoded
    /// without whitespace around them and as with [`Self::with_plain_text`]. A text is then never
    /// encoded in pieces.
    pub fn with_split_sentences(self, split_sentences: bool) -> Self {
        Self {
            split_sentences,
            ..self
        }
    }

    /// Whether special tokens in texts are ordinary text.
    fn is_plain(&self) -> bool {
        self.plain_text || self.split_sentences
    }

    /// Whether to skip and count records that cannot be read, instead of failing. Of a plain text
    /// that is read in pieces, a piece that the tokenizer cannot encode is always an error.
    pub fn with_skip_bad(self, skip_bad: bool) -> Self {
        Self { skip_bad, ..self }
    }

    /// The number of threads that encode. Default: all cores.
    pub fn with_num_workers(self, num_workers: usize) -> Self {
        Self {
            num_workers,
            ..self
        }
    }

    /// The time after which the state is saved, from which a later process continues. Default: a
    /// second.
    pub fn with_save_interval(self, save_interval: Duration) -> Self {
        Self {
            save_interval,
            ..self
        }
    }

    /// Whether to overwrite data sets that megaburn wrote, and to drop unfinished work with other
    /// settings.
    pub fn with_force(self, force: bool) -> Self {
        Self { force, ..self }
    }

    /// Whether to write the hash of the documents, which is [`Corpus::hash`](crate::Corpus::hash),
    /// into the description. For that, work that is continued reads again what was read before.
    pub(crate) fn with_text_hash(self, text_hash: bool) -> Self {
        Self { text_hash, ..self }
    }

    /// Encodes the files with a tokenizer and returns what was written. If a process was killed at
    /// it, the same call in another process continues its work.
    ///
    /// # Errors
    /// An input cannot be read; a record is no text and is not to be skipped; a data set exists and
    /// is not to be overwritten; an input or setting has changed since the process that was killed;
    /// all records were skipped. Without [`Self::with_plain_text`], `transformers` would encode
    /// otherwise ([`Tokenizer::check_prompts`]).
    pub fn run(
        &self,
        tokenizer: &dyn Tokenizer,
        mut on_event: impl FnMut(PreprocessEvent),
    ) -> Result<PreprocessSummary, DataError> {
        if self.num_workers == 0 {
            let what = "the number of workers";
            return Err(DataError::Zero { what });
        }
        if !self.is_plain() {
            tokenizer.check_prompts()?;
        }
        let inputs = Inputs::find(&self.inputs)?;
        self.keys.check(&inputs)?;
        on_event(PreprocessEvent::Found {
            num_files: inputs.files.len(),
            num_bytes: inputs.num_bytes(),
            num_left_out: inputs.num_left_out,
        });
        let token_type = TokenType::for_vocab(tokenizer.vocab_size());
        let outputs = self
            .prefixes()
            .into_iter()
            .map(|prefix| (prefix, token_type));
        let outputs: Vec<_> = outputs.collect();
        let identity = self.identity(&inputs, tokenizer);
        let complete = match Part::open(&self.out, &outputs, identity, self.force)? {
            Opened::Complete(part) => part,
            Opened::Writing(part) => self.write(part, &inputs, tokenizer, &mut on_event)?,
        };
        complete.commit()?;
        Ok(PreprocessSummary {
            prefixes: outputs.into_iter().map(|(prefix, _)| prefix).collect(),
            counts: Progress::of(Some(complete.progress())).counts,
        })
    }

    /// Encodes what is missing.
    fn write(
        &self,
        part: Part,
        inputs: &Inputs,
        tokenizer: &dyn Tokenizer,
        on_event: &mut dyn FnMut(PreprocessEvent),
    ) -> Result<CompletePart, DataError> {
        let is_resumed = part.progress().is_some();
        let token_type = TokenType::for_vocab(tokenizer.vocab_size());
        let end = token_type.bytes_of(&[tokenizer.eos()]);
        let end = self.append_eod.then_some(end);
        let mut writer = Writer::new(part, inputs, self.skip_bad, end);
        if is_resumed {
            on_event(PreprocessEvent::Resumed(writer.progress.counts));
        }
        let pieces = match self.split_sentences {
            true => None,
            false => tokenizer.pieces(!self.plain_text),
        };
        let encoder = Encoder {
            tokenizer,
            pieces: pieces.as_deref(),
            keys: self.keys.names(),
            append_eod: self.append_eod,
            plain_text: self.is_plain(),
            split_sentences: self.split_sentences,
            token_type,
            keep_text: self.text_hash,
        };
        let start = writer.progress.position;
        if self.text_hash {
            let keys = self.keys.names();
            let hash = rehash::hash_before(&inputs.files, keys, start, self.batch_bytes)?;
            writer.hash = Some(hash);
        }
        let mut saved = (Instant::now(), 0);
        let take = |batch: EncodedBatch| {
            let read_bytes = batch.read_bytes;
            writer.add(batch, on_event)?;
            on_event(PreprocessEvent::Progress {
                read_bytes,
                counts: writer.progress.counts,
            });
            if saved.0.elapsed() >= self.save_interval
                || read_bytes.saturating_sub(saved.1) >= SAVE_BYTES
            {
                writer.save()?;
                saved = (Instant::now(), read_bytes);
            }
            Ok(())
        };
        encoder.run(
            &inputs.files,
            start,
            self.num_workers,
            self.batch_bytes,
            take,
        )?;
        inputs.check_unchanged()?;
        let Finished {
            part,
            progress,
            hash,
        } = writer.finish()?;
        let names = outputs_of(self);
        let describe = |output: &Output| {
            let prefix = output.prefix().display().to_string();
            let index = names.iter().position(|name| *name == prefix);
            self.description(index.unwrap_or_default(), &progress, hash, tokenizer)
        };
        part.complete(json!(progress), describe)
    }

    /// Everything that decides what is written.
    fn identity(&self, inputs: &Inputs, tokenizer: &dyn Tokenizer) -> Value {
        let mut identity = json!({
            "command": "preprocess",
            "fields": self.keys.names(),
            "outputs": outputs_of(self),
            "append_eod": self.append_eod,
            "plain_text": self.is_plain(),
            "tokenizer": tokenizer_of(tokenizer),
            "files": inputs.identity(),
        });
        if self.split_sentences {
            identity["split_sentences"] = true.into();
        }
        identity
    }

    /// What the file next to a data set, the one of field `index`, says about it.
    fn description(
        &self,
        index: usize,
        progress: &Progress,
        hash: Option<u64>,
        tokenizer: &dyn Tokenizer,
    ) -> Value {
        let inputs = self.inputs.iter().map(|path| path.display().to_string());
        let mut description = json!({
            "command": "preprocess",
            "inputs": inputs.collect::<Vec<_>>(),
            "field": self.keys.names().get(index),
            "append_eod": self.append_eod,
            "plain_text": self.is_plain(),
            "tokenizer": tokenizer_of(tokenizer),
        });
        if self.split_sentences {
            description["split_sentences"] = true.into();
        }
        let text_bytes = progress.text_bytes.as_ref();
        if let Some(num_bytes) = text_bytes.and_then(|counts| counts.get(index)) {
            description["text_bytes"] = (*num_bytes).into();
        }
        if let Some(hash) = hash {
            description["text_xxh3"] = hex(hash).into();
        }
        description
    }

    fn prefixes(&self) -> Vec<PathBuf> {
        match &self.keys {
            Keys::Field(_) => vec![self.out.clone()],
            Keys::Each(keys) => {
                let name = |key: &String| with_ending(&self.out, &format!("_{key}_document"));
                keys.iter().map(name).collect()
            }
        }
    }
}

fn outputs_of(config: &PreprocessConfig) -> Vec<String> {
    let shown = |path: &PathBuf| path.display().to_string();
    config.prefixes().iter().map(shown).collect()
}

fn tokenizer_of(tokenizer: &dyn Tokenizer) -> Value {
    json!({
        "xxh3": format!("{:016x}", tokenizer.prompt_hash()),
        "vocab_size": tokenizer.vocab_size(),
        "eos": tokenizer.eos(),
    })
}
