use std::io;
use std::path::PathBuf;

use megaburn_store::StoreError;
use thiserror::Error;

/// Why training data, or a tokenizer, cannot be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum DataError {
    #[error("data file `{}` does not exist; check the path given as data", path.display())]
    Missing { path: PathBuf },
    #[error("data file `{}` is a directory; give one text, .jsonl, .ndjson or .json file", path.display())]
    Directory { path: PathBuf },
    #[error("data file `{}` cannot be read: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("`{name}` is empty; give a text with at least one sample")]
    Empty { name: String },
    #[error(
        "data file `{}` is not UTF-8: byte {offset} of {size} does not start a valid character; \
        convert the file to UTF-8",
        path.display()
    )]
    NotUtf8 {
        path: PathBuf,
        offset: usize,
        size: usize,
    },
    #[error("data file `{}` is not text: .{ending} files are not supported; {remedy}", path.display())]
    NoText {
        path: PathBuf,
        ending: String,
        remedy: &'static str,
    },
    #[error(
        "data file `{}`, line {line}: {why}; every line must be one JSON object with its text in \
        the field `{field}`",
        path.display()
    )]
    JsonLine {
        path: PathBuf,
        line: usize,
        field: String,
        why: String,
    },
    #[error(
        "data file `{}`: {why}; a .json file must be one array of JSON objects, or one object \
        per line, each with its text in the field `{field}`",
        path.display()
    )]
    Json {
        path: PathBuf,
        why: String,
        field: String,
    },
    #[error(
        "{name} has {found} tokens, but one sample of sequence length {seq_len} needs {needed}; \
        give more text, a shorter sequence (data.seq_len) or another part for validation \
        (data.validation_fraction, data.split)"
    )]
    TooShort {
        name: String,
        found: u64,
        needed: u64,
        seq_len: usize,
    },
    #[error(
        "{name}: token {token} at position {position} is outside the vocabulary of {vocab_size}; \
        use the tokenizer that produced it (data.tokenizer)"
    )]
    OutsideVocab {
        name: String,
        token: i64,
        position: u64,
        vocab_size: usize,
    },
    #[error(
        "validation fraction {fraction} is not in [0, 1); 0 uses every token for training, 0.05 \
        the last twentieth for validation"
    )]
    Fraction { fraction: f64 },
    #[error(
        "`{}` in the cache cannot be written: {source}; make room, or set data.cache_dir to another \
        folder",
        path.display()
    )]
    Cache { path: PathBuf, source: io::Error },
    #[error(
        "data set `{}` needs a folder for a cache, but neither XDG_CACHE_HOME nor HOME is set; set \
        data.cache_dir",
        path.display()
    )]
    NoCacheDir { path: PathBuf },
    #[error(
        "{name} is no data set of documents, which data.split and data.order = \"megatron\" need; encode it \
        with `megaburn data preprocess`"
    )]
    NoDocuments { name: String },
    #[error(
        "{name} is no data set of sentences, of which masked samples are made; encode it with \
        `megaburn data preprocess --split-sentences`"
    )]
    NoSentences { name: String },
    #[error(
        "data set `{}` was encoded by another tokenizer ({theirs}) than the one that is given \
        ({mine}); set data.tokenizer to the one that encoded it",
        prefix.display()
    )]
    EncodedByOther {
        prefix: PathBuf,
        theirs: String,
        mine: String,
    },
    #[error("the weight {weight} cannot be used: {why}")]
    Weight { weight: f64, why: String },
    #[error(
        "{num_weights} weights are given for {num_sources} data sets; give each a weight, or none"
    )]
    NumWeights {
        num_weights: usize,
        num_sources: usize,
    },
    #[error("{what} is 0 but must be at least 1")]
    Zero { what: &'static str },
    #[error(
        "a global batch of {global_batch_size} samples is smaller than a micro-batch of \
        {micro_batch_size}"
    )]
    SmallBatch {
        global_batch_size: usize,
        micro_batch_size: usize,
    },
    #[error(
        "a global batch of {global_batch_size} samples is not divisible by micro-batch {micro_batch_size} x dp {dp} = {}; use {}",
        micro_batch_size * dp,
        global_batch_size.next_multiple_of(micro_batch_size * dp)
    )]
    Batch {
        global_batch_size: usize,
        micro_batch_size: usize,
        dp: usize,
    },
    #[error(
        "the batch size cannot grow from {start} to {end} samples in steps of {increment}; start \
        at or below {end}, with a difference that is a multiple of {increment}"
    )]
    Ramp {
        start: usize,
        increment: usize,
        end: usize,
    },
    #[error(
        "two ranks read different tokens for sample {index}; their seeds, texts or sequence \
        lengths differ: give all hosts the same files and the same [data]"
    )]
    SampleConflict { index: u64 },
    #[error("no text to train on was found ({tried}); give a file as data")]
    NoSources { tried: String },
    #[error(
        "no tokenizer at `{}`: {why}; give a tokenizer.json, tokenizer.model, *.tiktoken or vocab.txt, \
        or a folder that contains one",
        path.display()
    )]
    NoTokenizer { path: PathBuf, why: String },
    #[error("`{}` cannot be used as a tokenizer: {why}", path.display())]
    BadTokenizer { path: PathBuf, why: String },
    #[error(
        "the tokenizer `{}` does not say which token ends a text ({looked}); name it in a \
        tokenizer_config.json next to it, like {{\"eos_token\": \"</s>\"}}",
        path.display()
    )]
    NoEos { path: PathBuf, looked: String },
    #[error(
        "the tokenizer `{tokenizer}` cannot encode the text {excerpt:?}: {why}; choose one that has ids \
        for all of it"
    )]
    Encode {
        tokenizer: String,
        excerpt: String,
        why: String,
    },
    #[error("a vocabulary of {vocab_size} is too small: 256 bytes and {num_special} special tokens need {}", 256 + num_special)]
    SmallVocab {
        vocab_size: usize,
        num_special: usize,
    },
    #[error(
        "special token {token:?} {why}; use a string that does not occur in text, like `<|tool|>`"
    )]
    BadSpecial { token: String, why: &'static str },
    #[error("`{}` exists; choose another path, or overwrite it with --force", path.display())]
    Exists { path: PathBuf },
    #[error("cannot write `{}`: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error(
        "`{}` is not an index of Megatron-LM that can be read: {why}; restore it, or write \
        the data set again",
        path.display()
    )]
    BadIndex { path: PathBuf, why: String },
    #[error(
        "`{}` has {found} bytes, but the sequences of its index end at {expected}: it was cut, or \
        the index is that of another file; give the two files that belong together",
        bin.display()
    )]
    OtherIndex {
        bin: PathBuf,
        found: u64,
        expected: i64,
    },
    #[error("`{}` has {num_documents} documents, numbered from 0: there is no document {index}", prefix.display())]
    NoDocument {
        prefix: PathBuf,
        index: u64,
        num_documents: u64,
    },
    #[error(
        "`{}` has tokens of type {}, but `{}` of type {}; only data sets of one tokenizer can be \
        merged",
        prefixes[0].display(), types[0], prefixes[1].display(), types[1]
    )]
    OtherType {
        prefixes: [PathBuf; 2],
        types: [&'static str; 2],
    },
    #[error(
        "documents cannot be divided by the weights {weights:?}: {why}; give up to three weights, \
        like 969,30,1"
    )]
    Split { weights: Vec<f64>, why: String },
    #[error("the fields to read cannot be used: {why}")]
    Keys { why: String },
    #[error(
        "{record}; skip and count such records with --on-error skip, or correct it, after which \
        work that was saved begins again with --force"
    )]
    BadRecord { record: String },
    #[error(
        "data file `{}` is a text that is encoded in pieces, of which one cannot be encoded and none \
        is skipped{why}; correct the text, or leave the file out",
        path.display()
    )]
    BadPiece { path: PathBuf, why: String },
    #[error("data file `{}`: its array is not valid JSON ({why}); correct the file", path.display())]
    BadArray { path: PathBuf, why: String },
    #[error(
        "data file `{}` cannot be read by this build, which has no Parquet: build megaburn with \
        `cargo build --release -p megaburn --features parquet`, or write its texts to a .jsonl file",
        path.display()
    )]
    NoParquet { path: PathBuf },
    #[error("data file `{}` cannot be read as Parquet: {why}", path.display())]
    Parquet { path: PathBuf, why: String },
    #[error(
        "data file `{}` has an object that goes over several lines; write each object into one \
        line, as `jq -c .` does, or put the objects into one array",
        path.display()
    )]
    LongObject { path: PathBuf },
    #[error(
        "no file with text was found for `{}`; in folders, files that end in .jsonl, .ndjson, \
        .json or .txt are read, also with .gz or .zst",
        path.display()
    )]
    NoInput { path: PathBuf },
    #[error("data file `{}` is given twice; give each file once", path.display())]
    InputTwice { path: PathBuf },
    #[error("data file `{}` was changed while it was read; start over with --force", path.display())]
    Changed { path: PathBuf },
    #[error("`{pattern}` is not a pattern of paths: {why}; write `[[]` for the character `[`")]
    Pattern { pattern: String, why: String },
    #[error("{num_workers} worker threads cannot be started: {why}; ask for fewer")]
    Workers { num_workers: usize, why: String },
    #[error("`{}` is being written by another process; wait for it, or choose another path", folder.display())]
    Busy { folder: PathBuf },
    #[error("`{}` is not overwritten: {why}; remove it yourself, or choose another path", path.display())]
    Foreign { path: PathBuf, why: String },
    #[error("the unfinished work `{}` is damaged: {why}; start over with --force", path.display())]
    DamagedPart { path: PathBuf, why: String },
    #[error(
        "the part {name} would have {why}; give it a larger weight, or leave it out with the weight \
        0"
    )]
    EmptyPart { name: &'static str, why: String },
    #[error("`{}` cannot be the path of a data set: {why}", path.display())]
    Prefix { path: PathBuf, why: String },
    #[error(
        "data file `{}` is no regular file, so work on it could not be continued; write it to a \
        file first",
        path.display()
    )]
    NoFile { path: PathBuf },
    #[error(
        "transformers and Megatron-LM encode otherwise than `{}` says: {why}; {remedy}, or encode \
        with --plain-text, which takes tokenizer.json alone",
        path.display()
    )]
    OtherIds {
        path: PathBuf,
        why: String,
        remedy: String,
    },
    #[error(
        "all {num_skipped} records were skipped, the last one for this: {record}; check the field \
        and the files, because nothing would be written"
    )]
    AllSkipped { num_skipped: u64, record: String },
    #[error(
        "`{}` and `{}` were written with different tokenizers; only data sets of one tokenizer \
        can be merged",
        prefixes[0].display(), prefixes[1].display()
    )]
    OtherTokenizer { prefixes: [PathBuf; 2] },
    #[error(
        "`{}` has unfinished work that differs: {why}; finish it with the command and the files that \
        began it, or drop it with --force",
        folder.display()
    )]
    OtherPart { folder: PathBuf, why: String },
    #[error(
        "`{name}` has {num_samples} samples, numbered from 0: there is no sample {index}; ask for \
        more samples when it is built"
    )]
    NoSample {
        name: String,
        index: u64,
        num_samples: u64,
    },
    #[error(
        "the index `{}` is damaged: {why}; remove it, and the next start builds it again",
        path.display()
    )]
    BadOrder { path: PathBuf, why: String },
    #[error(
        "the encoded text `{}` in the cache cannot be used: {why}; remove `{}.*` when no run uses it, \
        and the next start encodes the text again",
        prefix.display(), prefix.display()
    )]
    DamagedText { prefix: PathBuf, why: String },
    #[error(
        "{name} has no document of two tokens or more, but {num_documents} shorter ones, so there is \
        nothing to pack; give documents with text"
    )]
    NothingToPack { name: String, num_documents: u64 },
    #[error(
        "documents that are padded to multiples of {multiple} positions cannot fill sequences of \
        {seq_len}; use a sequence length of {}",
        seq_len.next_multiple_of(*multiple)
    )]
    PackMultiple { seq_len: usize, multiple: usize },
    #[error("{record}; correct it, or leave the file out")]
    BadText { record: String },
    #[error("data file `{}` was changed while it was encoded; start again when it stays as it is", path.display())]
    ChangedText { path: PathBuf },
    #[error("the order of samples cannot be computed: {why}")]
    OrderSize { why: String },
    #[error(
        "the seed {seed} is above 4294967295, the largest of NumPy's generator, which orders \
        Megatron-LM's samples; choose a smaller one (run.seed)"
    )]
    LargeSeed { seed: u64 },
    #[error("the data sets cannot be blended: {why}")]
    Blend { why: String },
    #[error(
        "the blend needs more samples of `{name}` than the {num_samples} that were made with the \
        surplus {surplus}; change its weight (data.train) or the number of samples (train.steps), or \
        raise the surplus (`BlendedDatasetConfig::with_surplus`)"
    )]
    Oversampled {
        name: String,
        num_samples: u64,
        surplus: f64,
    },
    #[error("no thread can be started that reads data ahead: {source}; lower data.num_workers")]
    Thread { source: io::Error },
    #[error("item {item} of the dataset cannot be read: {why}")]
    BurnDataset { item: u64, why: String },
    #[error("fill-in-the-middle cannot be used: {why}")]
    Fim { why: String },
    #[error("masked samples cannot be made: {why}")]
    MaskedSamples { why: String },
    #[error(
        "`{path}` cannot be generated: {why}; there are mock:ascending, mock:random, \
        synthetic:markov and synthetic:echo, with the options tokens=N, seed=N (not \
        mock:ascending) and distance=N (synthetic:echo), such as \
        synthetic:echo?tokens=1000000&distance=5; a file of this name is given as ./{path}"
    )]
    Generated { path: String, why: String },
    #[error(
        "`{url}` is the URL of a text; download it, because only data sets in Megatron-LM's format, \
        which `megaburn data preprocess` writes, are read from URLs"
    )]
    UrlOfText { url: String },
    #[error(transparent)]
    Store(#[from] StoreError),
}
