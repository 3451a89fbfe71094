use std::{
    cmp::Ordering,
    collections::{BinaryHeap, HashMap},
    ops::Range,
};

use tokenizers::Token;

use super::{sentencepiece::SPACE, trie::Trie, unknown::Unknown, vocabulary::Vocabulary};

/// A BPE that joins the neighbours whose union has the best score, the leftmost ones first.
///
/// Sources: Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units";
/// SentencePiece `src/bpe_model.cc`; tiktoken `src/lib.rs`.
#[derive(Clone, Debug)]
pub(super) struct Merges {
    vocabulary: Vocabulary,
    /// Ids of the tokens that a part of a text may become.
    pieces: HashMap<Box<str>, u32>,
    /// Scores by id; the highest is joined first.
    scores: Vec<f32>,
    options: MergeOptions,
    /// Whether the words of a text are encoded one by one, because no token crosses their limits.
    by_words: bool,
}

/// What distinguishes the kinds of BPE.
#[derive(Clone, Debug, Default)]
pub(super) struct MergeOptions {
    /// Strings that are never divided and never joined with others.
    pub(super) whole: Trie,
    /// Whether a part that is a token becomes that token without merges.
    pub(super) whole_parts: bool,
    /// Tokens that are divided again into what they were joined from, by id.
    pub(super) unused: Vec<bool>,
    /// What characters without a token become.
    pub(super) unknown: Unknown,
}

/// A range of the text that is a symbol, with its neighbours.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    end: usize,
    prev: usize,
    next: usize,
    is_whole: bool,
}

/// No neighbour.
const NONE: usize = usize::MAX;

/// Two neighbours whose union is a token.
#[derive(PartialEq)]
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    /// Length of the union; another length means that one of them was joined since.
    length: usize,
}

impl Eq for Pair {}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        let score = self.score.total_cmp(&other.score);
        score.then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Merges {
    /// The BPE with these tokens. `pieces` are those that a part of a text may become.
    pub(super) fn new(
        vocabulary: Vocabulary,
        pieces: impl IntoIterator<Item = (Box<str>, u32)>,
        scores: Vec<f32>,
        options: MergeOptions,
    ) -> Self {
        let pieces: HashMap<Box<str>, u32> = pieces.into_iter().collect();
        let has_unused = options.unused.contains(&true);
        let crosses = |piece: &str| word_end(piece) < piece.len();
        let by_words = !has_unused && !pieces.keys().any(|piece| crosses(piece));
        Self {
            vocabulary,
            pieces,
            scores,
            options,
            by_words,
        }
    }

    pub(super) fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    pub(super) fn encode(&self, text: &str) -> Vec<Token> {
        if self.options.whole_parts
            && let Some(&id) = self.pieces.get(text)
        {
            return vec![Token::new(id, String::new(), (0, text.len()))];
        }
        let mut tokens = Vec::new();
        let mut start = 0;
        while start < text.len() {
            let end = match self.by_words {
                true => start + word_end(&text[start..]),
                false => text.len(),
            };
            self.encode_part(text, start..end, &mut tokens);
            start = end;
        }
        tokens
    }

    /// Appends the tokens of a part of the text.
    fn encode_part(&self, text: &str, part: Range<usize>, tokens: &mut Vec<Token>) {
        let mut symbols = self.symbols(text, part);
        let mut joins = HashMap::new();
        let mut queue = BinaryHeap::new();
        for right in 1..symbols.len() {
            queue.extend(self.pair(text, &symbols, [right - 1, right], &mut joins));
        }
        while let Some(Pair {
            left,
            right,
            length,
            ..
        }) = queue.pop()
        {
            let [a, b] = [symbols[left], symbols[right]];
            // A symbol that was joined to its left neighbour is empty.
            if a.start == a.end || b.start == b.end || b.end - a.start != length {
                continue;
            }
            symbols[left].end = b.end;
            symbols[left].next = b.next;
            symbols[right].start = b.end;
            if b.next != NONE {
                symbols[b.next].prev = left;
            }
            for neighbours in [[a.prev, left], [left, b.next]] {
                if !neighbours.contains(&NONE) {
                    queue.extend(self.pair(text, &symbols, neighbours, &mut joins));
                }
            }
        }
        let parts = symbols.iter().filter(|symbol| symbol.start < symbol.end);
        for symbol in parts {
            self.push(text, symbol.start..symbol.end, &joins, tokens);
        }
    }

    /// The characters of a part of the text, and the strings that are never divided.
    fn symbols(&self, text: &str, part: Range<usize>) -> Vec<Symbol> {
        let text = &text[..part.end];
        let mut symbols = Vec::with_capacity(part.len());
        let mut start = part.start;
        while let Some(first) = text[start..].chars().next() {
            let whole = self.options.whole.longest(&text.as_bytes()[start..]);
            let end = start + whole.map_or(first.len_utf8(), |(length, _)| length);
            let index = symbols.len();
            symbols.push(Symbol {
                start,
                end,
                prev: index.wrapping_sub(1),
                next: if end == text.len() { NONE } else { index + 1 },
                is_whole: whole.is_some(),
            });
            start = end;
        }
        symbols
    }

    /// The pair of two neighbours, if it is a token. The lengths of the left sides of unused tokens
    /// are kept in `joins`.
    fn pair<'t>(
        &self,
        text: &'t str,
        symbols: &[Symbol],
        [left, right]: [usize; 2],
        joins: &mut HashMap<&'t str, usize>,
    ) -> Option<Pair> {
        let [a, b] = [symbols[left], symbols[right]];
        if a.is_whole || b.is_whole {
            return None;
        }
        let piece = &text[a.start..b.end];
        let id = *self.pieces.get(piece)? as usize;
        if self.options.unused.get(id) == Some(&true) {
            joins.insert(piece, a.end - a.start);
        }
        Some(Pair {
            score: self.scores[id],
            left,
            right,
            length: piece.len(),
        })
    }

    /// Appends the tokens of a symbol.
    fn push<'t>(
        &self,
        text: &'t str,
        range: Range<usize>,
        joins: &HashMap<&'t str, usize>,
        tokens: &mut Vec<Token>,
    ) {
        let mut open = vec![range];
        while let Some(range) = open.pop() {
            let piece = &text[range.clone()];
            match (joins.get(piece), self.pieces.get(piece)) {
                (Some(left), _) => {
                    let middle = range.start + left;
                    open.extend([middle..range.end, range.start..middle]);
                }
                (None, Some(&id)) => {
                    tokens.push(Token::new(id, String::new(), (range.start, range.end)))
                }
                (None, None) => self.options.unknown.push(text, range, tokens),
            }
        }
    }
}

/// Where the first word of a text ends: before the first space that follows another character.
fn word_end(text: &str) -> usize {
    let is_space = |c: char| c == SPACE;
    let spaces = text.len() - text.trim_start_matches(is_space).len();
    let end = text[spaces..].find(is_space);
    end.map_or(text.len(), |end| spaces + end)
}
