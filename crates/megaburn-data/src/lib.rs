//! The training data of a run: text or generated symbols, encoded as tokens, in an order that is a
//! pure function `(seed, sample index) -> tokens`. The tokens of the sample with a given index
//! depend neither on the layout, nor on the batch sizes, nor on restarts.
//!
//! A [`Corpus`] is encoded by a [`Tokenizer`] into a [`TokenDataset`], which is split into a
//! training and a validation part. A [`Sampler`] assigns an index to each sample of a part. A
//! [`BatchSchedule`] gives the number of samples of a step, a [`GlobalBatch`] the indices that each
//! data-parallel rank reads.
//!
//! A [`PackedSampler`] fills samples with whole documents, and a [`BlendedSampler`] mixes samples of
//! several data sets by weight.
//!
//! A [`PreprocessConfig`] encodes text files of any size into an [`IndexedDataset`], in
//! Megatron-LM's format. [`GptDataset`] and [`BlendedDataset`] have the samples of such data sets in
//! Megatron-LM's order. With the feature `object-store`, an [`IndexedDataset`] is read from S3, Google
//! Cloud Storage and HTTP servers too, as an [`ObjectStoreConfig`] says.
//!
//! [`BertDataset`] and [`T5Dataset`] have Megatron-LM's masked samples of data sets of sentences,
//! for the models of these names.
//!
//! A [`GeneratedSource`] is data without files, for benches and for tests that know the lowest
//! possible loss. A [`FimConfig`] transforms the documents of any samples for fill-in-the-middle.
//!
//! ```
//! use megaburn_data::{ByteTokenizer, Corpus, GlobalBatch, Sampler, Samples, TokenDataset};
//!
//! let text = "It was the best of times, it was the worst of times. ".repeat(20);
//! let corpus = Corpus::from_documents("two cities", vec![text])?;
//! let split = TokenDataset::new(&corpus, &ByteTokenizer)?.split(0.1)?;
//! let order = Sampler::shuffled(split.train, 16, 42)?;
//! let batch = GlobalBatch::new(8, 2, 2)?; // 8 samples a step, 2 a micro-batch, 2 ranks
//! assert_eq!(batch.num_micro_batches(), 2);
//!
//! let mine = order.batch(batch.micro_batch(0, 1, 0))?; // step from 0 on, rank 1, its micro-batch 0
//! assert_eq!(mine, [order.sample(4)?, order.sample(5)?]);
//! assert_eq!(order.tokens(4)?.len(), 16 + 1); // inputs are the first 16 tokens, targets the last 16
//! # Ok::<(), megaburn_data::DataError>(())
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]

mod batch;
mod batch_schedule;
mod blend;
#[cfg(feature = "dataset")]
mod burn_dataset;
mod cache_folder;
mod corpus;
mod dataset;
mod endings;
mod epoch_order;
mod error;
mod files;
mod fim;
mod generated;
mod index_cache;
mod indexed;
mod json;
mod megatron;
mod packing;
mod part;
mod permutation;
mod preprocess;
mod read_ahead;
mod remote;
mod sample_log;
mod sampler;
mod samples;
mod synthetic;
mod text_cache;
mod text_hash;
mod token_store;
mod tokenizer;
mod union;

pub use batch::GlobalBatch;
pub use batch_schedule::BatchSchedule;
pub use blend::{Blend, BlendedSampler};
#[cfg(feature = "dataset")]
pub use burn_dataset::{DatasetSampler, SamplesDataset};
pub use cache_folder::default_cache_dir;
pub use corpus::Corpus;
pub use dataset::{Split, TokenDataset};
pub use epoch_order::EpochOrder;
pub use error::DataError;
pub use files::read_text;
pub use fim::{FimConfig, FimSamples};
pub use generated::{GeneratedPart, GeneratedSource};
pub use index_cache::IndexEvent;
pub use indexed::{
    DocumentSize, DocumentSplit, IndexedDataset, LengthHistogram, TokenType, merge, split,
};
pub use megatron::{
    BertDataset, BertDatasetConfig, BertSample, BertSettings, BlendedDataset, BlendedDatasetConfig,
    DocumentRange, GptDataset, GptDatasetConfig, MaskedDatasetConfig, MaskedKind, MaskingConfig,
    MidLevelConfig, MidLevelDataset, SequenceRange, T5Dataset, T5DatasetConfig, T5Sample,
    T5Settings,
};
pub use packing::{PackedSampler, PackedSamplerConfig, PackingStats};
pub use permutation::Permutation;
pub use preprocess::{PreprocessConfig, PreprocessCounts, PreprocessEvent, PreprocessSummary};
pub use read_ahead::ReadAhead;
pub use remote::{ObjectStoreConfig, ObjectStoreEvent};
pub use sample_log::{SampleLog, order_hash};
pub use sampler::Sampler;
pub use samples::{Sample, Samples};
pub use synthetic::{NUM_SYMBOLS, Synthetic, SyntheticKind};
pub use text_cache::{TextCache, TextCacheEvent};
pub use tokenizer::{
    BOS, ByteTokenizer, EOS, HfTokenizer, PAD, PieceEncoder, PublishedTokenizer, TextStream,
    Tokenizer, TokenizerTrainer, TrainedTokenizer, bits_per_byte,
};
pub use union::UnionSampler;
