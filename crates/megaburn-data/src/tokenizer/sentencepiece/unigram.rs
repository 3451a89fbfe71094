use tokenizers::Token;

use super::{
    super::{trie::Trie, unknown::Unknown, vocabulary::Vocabulary},
    proto::{Kind, SentencePieceModel},
};

/// How much worse an unknown character is than the worst token.
const UNKNOWN_PENALTY: f32 = 10.0;

/// Divides a text into the tokens whose scores have the greatest sum.
///
/// Sums are kept in f32, as in SentencePiece, because rounding decides between divisions of long
/// texts. Sources: Kudo 2018, "Subword Regularization"; SentencePiece `src/unigram_model.cc`.
#[derive(Clone, Debug)]
pub(in super::super) struct Unigram {
    vocabulary: Vocabulary,
    trie: Trie,
    scores: Vec<Score>,
    highest: f32,
    unknown_score: f32,
    unknown: Unknown,
}

#[derive(Clone, Copy, Debug)]
enum Score {
    Of(f32),
    /// A bonus by which the token is always chosen.
    UserDefined,
}

/// The best division of a text up to a position.
#[derive(Clone, Copy)]
struct Best {
    score: f32,
    /// Where its last token begins; `None` if there is no division.
    start: Option<usize>,
    /// Its last token; `None` for an unknown character.
    id: Option<u32>,
}

impl Unigram {
    /// The model with these tokens.
    pub(in super::super) fn new(
        model: &SentencePieceModel,
        vocabulary: Vocabulary,
        unknown: Unknown,
    ) -> Self {
        let normal = model
            .pieces
            .iter()
            .filter(|piece| piece.kind == Kind::Normal);
        let normal = normal.map(|piece| piece.score);
        let lowest = normal.clone().fold(f32::MAX, f32::min);
        let highest = normal.fold(f32::MIN_POSITIVE, f32::max);
        let pieces = (0..).zip(&model.pieces);
        let pieces =
            pieces.filter(|(_, piece)| matches!(piece.kind, Kind::Normal | Kind::UserDefined));
        let score = |piece: &super::proto::Piece| match piece.kind {
            Kind::UserDefined => Score::UserDefined,
            _ => Score::Of(piece.score),
        };
        Self {
            vocabulary,
            trie: Trie::new(pieces.map(|(id, piece)| (piece.text.as_str(), id))),
            scores: model.pieces.iter().map(score).collect(),
            highest,
            unknown_score: lowest - UNKNOWN_PENALTY,
            unknown,
        }
    }

    pub(in super::super) fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    pub(in super::super) fn encode(&self, text: &str) -> Vec<Token> {
        let best = self.best(text);
        let mut tokens = Vec::new();
        let mut parts = Vec::new();
        let mut end = text.len();
        while let Some(start) = best[end].start {
            parts.push((start, end, best[end].id));
            end = start;
        }
        for (start, end, id) in parts.into_iter().rev() {
            match id {
                Some(id) => tokens.push(Token::new(id, String::new(), (start, end))),
                None => self.unknown.push(text, start..end, &mut tokens),
            }
        }
        tokens
    }

    /// The best divisions up to each position.
    fn best(&self, text: &str) -> Vec<Best> {
        let none = Best {
            score: 0.0,
            start: None,
            id: None,
        };
        let mut best = vec![none; text.len() + 1];
        for (start, char) in text.char_indices() {
            let before = best[start].score;
            let mut offer = |end: usize, score: f32, id: Option<u32>| {
                let best: &mut Best = &mut best[end];
                let score = score + before;
                if best.start.is_none() || score > best.score {
                    *best = Best {
                        score,
                        start: Some(start),
                        id,
                    };
                }
            };
            let single = char.len_utf8();
            let mut has_single = false;
            for (length, id) in self.trie.prefixes(&text.as_bytes()[start..]) {
                let score = match self.scores[id as usize] {
                    Score::Of(score) => score,
                    Score::UserDefined => length as f32 * self.highest - 0.1,
                };
                offer(start + length, score, Some(id));
                has_single |= length == single;
            }
            if !has_single {
                offer(start + single, self.unknown_score, None);
            }
        }
        best
    }
}
