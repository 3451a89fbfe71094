//! Which of a rank's queries attend to which of the keys at hand.

use std::ops::Range;

use megaburn_kernels::AttentionOptions;
use megaburn_mesh::Zigzag;

use super::Mask;

/// A range of this rank's queries, a range of the keys at hand, and the options of their attention.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct KeyValuePart {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
    pub(super) options: AttentionOptions,
}

/// The parts of the `len` queries of `mine` with the keys of another rank, `theirs`.
pub(super) fn with_peer_keys(
    mask: &Mask,
    mine: Zigzag,
    theirs: Zigzag,
    len: usize,
) -> Vec<KeyValuePart> {
    let all = 0..len;
    let chunk = len / 2;
    let front = 0..chunk;
    let back = chunk..len;
    let full = mask.open();
    let part = |queries: &Range<usize>, keys: &Range<usize>, options| KeyValuePart {
        queries: queries.clone(),
        keys: keys.clone(),
        options,
    };
    let [at, _] = mine.chunks();
    let [other, _] = theirs.chunks();
    match mask.is_plain() {
        // A single rank holds the full sequence.
        _ if mine.ranks() == 1 => vec![part(&all, &all, mask.whole())],
        true if !mask.causal => vec![part(&all, &all, full)],
        // A rank's back chunk follows its front chunk in the sequence too, so the causal mask
        // applies as is.
        true if at == other => vec![part(&all, &all, mask.whole())],
        // For an earlier rank, its front chunk precedes both of ours and its back chunk follows
        // both.
        true if other < at => vec![part(&all, &front, full)],
        // For a later rank, both chunks lie between our front and our back chunk.
        true => vec![part(&back, &all, full)],
        false => {
            let halves = [&front, &back];
            let pairs = [(0, 0), (1, 0), (0, 1), (1, 1)]
                .into_iter()
                .filter_map(|(q, k)| {
                    let chunks = [mine.chunks()[q], theirs.chunks()[k]];
                    let options = from_chunks(mask, chunks, 2 * mine.ranks(), chunk)?;
                    Some(part(halves[q], halves[k], options))
                });
            pairs.collect()
        }
    }
}

/// Options for chunk `query` of `chunks`, with `len` positions each, attending to chunk `key`;
/// `None` if no query sees a key.
fn from_chunks(
    mask: &Mask,
    [query, key]: [usize; 2],
    chunks: usize,
    len: usize,
) -> Option<AttentionOptions> {
    if mask.causal && key > query {
        return None;
    }
    // A window only limits how far a query looks back.
    let window = mask.window.filter(|_| key <= query);
    let ahead = if window.is_some() { query - key } else { 0 };
    let is_far = window.is_some_and(|window| ahead * len >= window + len - 1);
    if is_far && mask.documents.is_none() {
        return None;
    }
    Some(AttentionOptions {
        causal: mask.causal && key == query,
        window,
        query_offset: if mask.documents.is_some() {
            0
        } else {
            ahead * len
        },
        dropout: mask.dropout_at(query * len, key * len),
        sequences: mask
            .documents
            .as_ref()
            .map(|of| of.sequences(chunks, false, ahead)),
        ..mask.open()
    })
}

/// The parts of the `len` queries of `mine` with the keys of full sequences, in order.
pub(super) fn with_all_keys(mask: &Mask, mine: Zigzag, len: usize) -> Vec<KeyValuePart> {
    let chunk = len / 2;
    let seq_len = chunk * 2 * mine.ranks();
    if mask.is_plain() && !mask.causal {
        return vec![KeyValuePart {
            queries: 0..len,
            keys: 0..seq_len,
            options: mask.whole(),
        }];
    }
    let halves = [0..chunk, chunk..len].into_iter().zip(mine.chunks());
    let parts = halves.flat_map(|(queries, at)| {
        let start = at * chunk;
        let end = (at + 1) * chunk;
        if mask.is_plain() {
            // Two calls that any kernel supports, instead of one whose queries start after the
            // keys.
            let before = KeyValuePart {
                queries: queries.clone(),
                keys: 0..start,
                options: mask.open(),
            };
            let own = KeyValuePart {
                queries,
                keys: start..end,
                options: mask.whole(),
            };
            return [before, own]
                .into_iter()
                .filter(|part| !part.keys.is_empty())
                .collect();
        }
        let documents = mask.documents.as_ref();
        let first = mask
            .window
            .map_or(0, |window| (start + 1).saturating_sub(window));
        let keys = match documents {
            Some(_) => 0..seq_len,
            None => first..if mask.causal { end } else { seq_len },
        };
        let options = AttentionOptions {
            causal: mask.causal,
            window: mask.window,
            query_offset: if documents.is_some() {
                0
            } else {
                start - keys.start
            },
            dropout: mask.dropout_at(start, keys.start),
            sequences: documents.map(|of| of.sequences(2 * mine.ranks(), true, at)),
            ..mask.open()
        };
        vec![KeyValuePart {
            queries,
            keys,
            options,
        }]
    });
    parts.collect()
}
