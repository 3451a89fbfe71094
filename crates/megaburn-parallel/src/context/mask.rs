//! Which queries attend to which keys, in terms of full sequences.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use burn::tensor::Device;
use megaburn_kernels::{AttentionDropout, AttentionKernel, AttentionOptions, PackedSequences};
use megaburn_mesh::PackedRows;

use super::order::{Order, Span};
use crate::max_logits::MaxLogitsRecorder;

/// [`PackedRows`] of a micro-batch, with a cache of what attention derives from them, shared by all
/// layers.
#[derive(Clone, Debug)]
pub struct PackedDocuments {
    documents: Arc<PackedRows>,
    told: Arc<Mutex<BTreeMap<Told, PackedSequences>>>,
    orders: Arc<Mutex<Orders>>,
}

/// Cached orders.
type Orders = Vec<(Span, Arc<Order>)>;

/// Cache key: chunks per document of the queries, chunks per document of the keys, and how many
/// chunks the queries start after the keys.
type Told = (usize, usize, usize);

impl PackedDocuments {
    /// Wraps the documents of a micro-batch.
    pub fn new(documents: PackedRows) -> Self {
        Self {
            documents: Arc::new(documents),
            told: Arc::default(),
            orders: Arc::default(),
        }
    }

    /// The documents.
    pub fn documents(&self) -> &PackedRows {
        &self.documents
    }

    /// Sequences whose queries are one of `chunks` chunks of each document. The keys are one chunk
    /// as well, or, with `whole`, all chunks. The queries start `ahead` chunks after the keys.
    pub(super) fn sequences(&self, chunks: usize, whole: bool, ahead: usize) -> PackedSequences {
        let of_keys = if whole { 1 } else { chunks };
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || {
            let offsets = self.documents.chunk_lens(chunks).into_iter();
            let offsets = offsets.map(|row| row.into_iter().map(|len| ahead * len).collect());
            PackedSequences::new(self.documents.chunk_bounds(chunks))
                .with_keys(self.documents.chunk_bounds(of_keys))
                .with_offsets(offsets.collect::<Vec<Vec<usize>>>())
        };
        told.entry((chunks, of_keys, ahead))
            .or_insert_with(new)
            .clone()
    }

    /// The order of the positions that the members of `span` hold, `[len, b]` each.
    fn order(&self, span: Span, dims: [usize; 2], on: &Device) -> Arc<Order> {
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = orders.iter().find(|(of, _)| *of == span) {
            return order.clone();
        }
        let order = Arc::new(Order::of_documents(&self.documents, &span, dims, on));
        orders.push((span, order.clone()));
        order
    }

    /// The unsplit documents.
    pub(crate) fn whole(&self) -> PackedSequences {
        self.sequences(1, true, 0)
    }
}

/// The options of attention over full sequences.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mask {
    pub(crate) causal: bool,
    pub(crate) window: Option<usize>,
    /// Factor of the scores; `None` means `1 / sqrt(d)` for heads of size `d`.
    pub(crate) scale: Option<f64>,
    /// Scores are `cap * tanh(score / cap)`.
    pub(crate) soft_cap: Option<f64>,
    /// Dropout, keyed by positions in the full sequences.
    pub(crate) dropout: Option<AttentionDropout>,
    pub(crate) documents: Option<PackedDocuments>,
    pub(crate) kernel: AttentionKernel,
    /// Records the largest logits of the heads that this rank attends with.
    pub(crate) recorder: Option<MaxLogitsRecorder>,
}

impl Mask {
    /// Whether there is neither window, dropout nor documents, so that a query attends to all keys
    /// or, if causal, to all keys up to its own.
    pub(super) fn is_plain(&self) -> bool {
        self.window.is_none() && self.dropout.is_none() && self.documents.is_none()
    }

    /// Options in which every query attends to every given key.
    pub(super) fn open(&self) -> AttentionOptions {
        AttentionOptions {
            scale: self.scale,
            soft_cap: self.soft_cap,
            kernel: self.kernel,
            ..AttentionOptions::default()
        }
    }

    /// Options for full sequences.
    pub(crate) fn whole(&self) -> AttentionOptions {
        AttentionOptions {
            causal: self.causal,
            window: self.window,
            dropout: self.dropout.clone(),
            sequences: self.documents.as_ref().map(PackedDocuments::whole),
            ..self.open()
        }
    }

    /// The order of the positions that the members of `span` hold, `[len, b]` each.
    pub(super) fn order(&self, span: Span, dims: [usize; 2], on: &Device) -> Arc<Order> {
        match &self.documents {
            Some(documents) => documents.order(span, dims, on),
            None => Arc::new(Order::of_chunks(&span, on)),
        }
    }

    /// The dropout for queries and keys that start at these positions.
    pub(super) fn dropout_at(&self, query: usize, key: usize) -> Option<AttentionDropout> {
        self.dropout
            .clone()
            .map(|AttentionDropout { p, key: all }| {
                AttentionDropout::new(p, all.with_offset(2, query).with_offset(3, key))
            })
    }
}
