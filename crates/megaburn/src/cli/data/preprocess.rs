use std::path::PathBuf;

use clap::{Args, ValueEnum};
use megaburn_data::{PreprocessConfig, PreprocessEvent, PreprocessSummary, TokenType};
use megaburn_train::{TrainError, config::Tokenizer};

use super::{super::print, counted, failed, progress::ProgressDisplay};

/// Number of skipped records that are named.
const NAMED: u64 = 10;

#[derive(Args)]
pub(in crate::cli) struct PreprocessArgs {
    /// Files, folders, or patterns in quotes. .jsonl and .ndjson: one JSON object per line; .json:
    /// an array of them, or one per line; other files: one document of plain text. All may be
    /// compressed (.gz, .zst). Builds with the feature `parquet` also read .parquet.
    #[arg(value_name = "INPUT", required = true)]
    inputs: Vec<PathBuf>,
    /// `byte`, the file of a tokenizer (tokenizer.json, tokenizer.model, *.tiktoken, vocab.txt), or a
    /// folder that holds one.
    #[arg(long, value_name = "TOKENIZER")]
    tokenizer: String,
    /// Writes PREFIX.bin and PREFIX.idx.
    #[arg(long, value_name = "PREFIX", visible_alias = "output-prefix")]
    out: PathBuf,
    /// The field of the text. `a.b` is the field `b` of the object `a`.
    #[arg(
        long,
        value_name = "KEY",
        default_value = "text",
        conflicts_with = "json_keys"
    )]
    field: String,
    /// Several fields, each written as PREFIX_KEY_document, the name that Megatron-LM gives.
    #[arg(long, value_name = "KEY", num_args = 1.., value_delimiter = ',')]
    json_keys: Vec<String>,
    /// End each document with the tokenizer's token for this.
    #[arg(long)]
    append_eod: bool,
    /// Encode special tokens that are spelled out in a document as ordinary text, and add none at
    /// its start. By default they are treated as by Megatron-LM.
    #[arg(long)]
    plain_text: bool,
    /// Divide each text into its sentences, as BERT and T5 need them. Sentences end where Unicode
    /// says (UAX 29), and at line breaks; they are encoded as with --plain-text.
    #[arg(long)]
    split_sentences: bool,
    /// Threads that encode. Default: one per core.
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// What to do with a line that is no JSON object with this text: fail and name it, or skip and
    /// count it.
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = OnError::Fail)]
    on_error: OnError,
    /// Overwrite a data set that megaburn wrote, and drop unfinished work with other settings.
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum OnError {
    Fail,
    Skip,
}

impl PreprocessArgs {
    pub(super) fn run(self) -> Result<(), TrainError> {
        let tokenizer = Tokenizer::from(self.tokenizer.clone());
        let tokenizer = tokenizer.open().map_err(failed)?;
        let mut display = ProgressDisplay::new();
        let vocab_size = tokenizer.vocab_size();
        let mut skipped = 0;
        let report = |event| match event {
            PreprocessEvent::Found {
                num_files,
                num_bytes,
                num_left_out,
            } => {
                let files = counted(num_files as u64, "file");
                display.note(format!("data     {files}, {num_bytes} bytes"));
                if num_left_out > 0 {
                    let files = counted(num_left_out as u64, "file");
                    display.note(format!(
                        "note     {files} of other kinds in folders left out"
                    ));
                }
                let name = TokenType::for_vocab(vocab_size).name();
                display.note(format!("vocab    {vocab_size} ids, written as {name}"));
                display.start(num_bytes);
            }
            PreprocessEvent::Resumed(counts) => {
                let documents = counted(counts.documents, "document");
                display.note(format!("resumed  after {documents}"));
            }
            PreprocessEvent::Skipped(record) => {
                skipped += 1;
                if skipped <= NAMED {
                    display.note(format!("skipped  {record}"));
                }
            }
            PreprocessEvent::Progress { read_bytes, counts } => display.show(read_bytes, counts),
            _ => {}
        };
        let summary = self.config().run(&*tokenizer, report).map_err(failed);
        display.finish();
        show(&summary?);
        Ok(())
    }

    fn config(self) -> PreprocessConfig {
        let mut config = PreprocessConfig::new(self.inputs, self.out)
            .with_append_eod(self.append_eod)
            .with_plain_text(self.plain_text)
            .with_split_sentences(self.split_sentences)
            .with_skip_bad(self.on_error == OnError::Skip)
            .with_force(self.force);
        if let Some(workers) = self.workers {
            config = config.with_num_workers(workers);
        }
        if self.json_keys.is_empty() {
            config.with_field(self.field)
        } else {
            config.with_json_keys(self.json_keys)
        }
    }
}

/// Prints what was written.
fn show(summary: &PreprocessSummary) {
    let counts = summary.counts;
    let documents = counted(counts.documents, "document");
    let tokens = counted(counts.tokens, "token");
    let mut line = format!("total    {documents}, {tokens}");
    if counts.empty > 0 {
        line += &format!(", {} without tokens", counted(counts.empty, "document"));
    }
    if counts.skipped > 0 {
        line += &format!(", {} skipped", counted(counts.skipped, "record"));
    }
    print::note(line);
    for prefix in &summary.prefixes {
        print::note(format!("wrote    {0}.bin, {0}.idx", prefix.display()));
    }
}
