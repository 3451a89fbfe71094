//! Who sees whom, in whole sequences.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use megaburn_kernels::{AttentionDropout, AttentionOptions, PackedSequences};
use megaburn_mesh::PackedRows;

use super::order::{Order, Span};

/// [`PackedRows`] of a micro-batch, with what attention is told of them, once for all layers.
#[derive(Clone, Debug)]
pub struct PackedDocuments {
    documents: Arc<PackedRows>,
    told: Arc<Mutex<BTreeMap<Told, PackedSequences>>>,
    orders: Arc<Mutex<Orders>>,
}

/// Orders that were asked for.
type Orders = Vec<(Span, Arc<Order>)>;

/// Of which chunks of documents queries and keys are: how many there are of each, and how many chunks
/// queries begin behind the keys.
type Told = (usize, usize, usize);

impl PackedDocuments {
    /// Those of a micro-batch.
    pub fn new(documents: PackedRows) -> Self {
        Self {
            documents: Arc::new(documents),
            told: Arc::default(),
            orders: Arc::default(),
        }
    }

    /// Which they are.
    pub fn documents(&self) -> &PackedRows {
        &self.documents
    }

    /// Queries of one of `chunks` chunks of each document; keys of as many, or, whole, of all chunks. The
    /// queries begin `ahead` chunks behind the keys.
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

    /// In which order the positions of members stand, which all layers ask for.
    pub(super) fn order(&self, span: Span, new: impl FnOnce(&Span) -> Order) -> Arc<Order> {
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = orders.iter().find(|(of, _)| *of == span) {
            return order.clone();
        }
        let order = Arc::new(new(&span));
        orders.push((span, order.clone()));
        order
    }

    /// Documents as they are.
    pub(crate) fn whole(&self) -> PackedSequences {
        self.sequences(1, true, 0)
    }
}

/// What attention to whole sequences is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mask {
    pub(crate) causal: bool,
    pub(crate) window: Option<usize>,
    /// Factor of the scores; none: of heads of `d`, `1 / sqrt(d)`.
    pub(crate) scale: Option<f64>,
    /// Of whole sequences' probabilities.
    pub(crate) dropout: Option<AttentionDropout>,
    pub(crate) documents: Option<PackedDocuments>,
}

impl Mask {
    /// Whether a query sees all keys, or all before it, and nothing is dropped.
    pub(super) fn is_plain(&self) -> bool {
        self.window.is_none() && self.dropout.is_none() && self.documents.is_none()
    }

    /// Attention to all keys that are given.
    pub(super) fn open(&self) -> AttentionOptions {
        AttentionOptions {
            scale: self.scale,
            ..AttentionOptions::default()
        }
    }

    /// Attention to whole sequences.
    pub(crate) fn whole(&self) -> AttentionOptions {
        AttentionOptions {
            causal: self.causal,
            window: self.window,
            dropout: self.dropout.clone(),
            sequences: self.documents.as_ref().map(PackedDocuments::whole),
            ..self.open()
        }
    }

    /// The dropout of queries and keys from these positions on.
    pub(super) fn dropout_at(&self, query: usize, key: usize) -> Option<AttentionDropout> {
        self.dropout
            .clone()
            .map(|AttentionDropout { p, key: all }| {
                AttentionDropout::new(p, all.with_offset(2, query).with_offset(3, key))
            })
    }
}
