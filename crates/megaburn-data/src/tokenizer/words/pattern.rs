//! Cuts text by the regular expressions of tokenizers.

use regex_automata::{
    Anchored, Input, MatchKind, PatternID,
    hybrid::dfa::{Cache, DFA},
    nfa::thompson::NFA,
    util::syntax,
};
use tokenizers::Error;

/// The end of the expressions of GPT-2 and its successors: of a run of whitespace before something
/// else, the last character is left to that.
const SPACES_END: &str = r"|\s+(?!\S)|\s+";
const SPACES: &str = r"\s+";
/// Bytes for the states of an automaton.
const CACHE_BYTES: usize = 1 << 23;

/// Cuts text into what a regular expression matches and what is between the matches.
#[derive(Debug)]
pub(super) struct Pattern {
    dfa: DFA,
    /// The pattern whose matches leave their last character, if they have several and are not at
    /// the end of the text.
    spaces: Option<PatternID>,
}

impl Pattern {
    /// `None` if the expression needs more than an automaton, or could mean something else to one.
    pub(super) fn new(expression: &str) -> Option<Self> {
        if has_possessive(expression) {
            return None;
        }
        let (words, is_cut) = match expression.strip_suffix(SPACES_END) {
            Some(words) => (words, true),
            None => (expression, false),
        };
        let parsed = syntax::parse(words).ok()?;
        let properties = parsed.properties();
        if properties.minimum_len().is_none_or(|least| least == 0)
            || !properties.look_set().is_empty()
        {
            return None;
        }
        let config = DFA::config()
            .match_kind(MatchKind::LeftmostFirst)
            .cache_capacity(CACHE_BYTES);
        let patterns = if is_cut {
            vec![words, SPACES]
        } else {
            vec![words]
        };
        let dfa = DFA::builder()
            .configure(config)
            .build_many(&patterns)
            .ok()?;
        let spaces = is_cut.then(|| PatternID::must(1));
        Some(Self { dfa, spaces })
    }

    /// The automaton of the expression, and of runs of whitespace if they are cut.
    pub(super) fn nfa(&self) -> &NFA {
        self.dfa.get_nfa()
    }

    pub(super) fn cache(&self) -> Cache {
        self.dfa.create_cache()
    }

    /// Gives each piece of a text to `each`, in order.
    pub(super) fn cut(
        &self,
        cache: &mut Cache,
        text: &str,
        each: &mut dyn FnMut(&str) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (mut between, mut at) = (0, 0);
        while at < text.len() {
            let Some(end) = self.end(cache, text, at)? else {
                at += text[at..].chars().next().map_or(1, char::len_utf8);
                continue;
            };
            if between < at {
                each(&text[between..at])?;
            }
            each(&text[at..end])?;
            (between, at) = (end, end);
        }
        if between < at {
            each(&text[between..at])?;
        }
        Ok(())
    }

    /// Where the match that begins at `at` ends.
    fn end(&self, cache: &mut Cache, text: &str, at: usize) -> Result<Option<usize>, Error> {
        let input = Input::new(text).range(at..).anchored(Anchored::Yes);
        let Some(found) = self.dfa.try_search_fwd(cache, &input)? else {
            return Ok(None);
        };
        let end = found.offset();
        if Some(found.pattern()) == self.spaces && end < text.len() {
            let last = text[at..end].char_indices().next_back();
            if let Some((before, _)) = last.filter(|(before, _)| *before > 0) {
                return Ok(Some(at + before));
            }
        }
        Ok(Some(end))
    }
}

/// Whether an expression may have a possessive repetition, such as `a++` or `a{2}+`: these have
/// another meaning in `regex_automata`. Inside of `[..]` all are ordinary characters.
fn has_possessive(expression: &str) -> bool {
    let (mut depth, mut last, mut before) = (0usize, ' ', ' ');
    let mut chars = expression.chars();
    while let Some(char) = chars.next() {
        let is_repeated = match last {
            '?' | '*' | '+' => true,
            '}' => matches!(before, '0'..='9' | ',' | ' '),
            _ => false,
        };
        if char == '+' && is_repeated && depth == 0 {
            return true;
        }
        (before, last) = (last, char);
        match char {
            // What is escaped is no repetition.
            '\\' => {
                chars.next();
                last = ' ';
            }
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(r"\p{L}+|[^?*+]+|\++|\p{N}{1,3}| ?x", false)]
    #[case(r"[a[^b]?+]+", false)]
    #[case(r"a?+", true)]
    #[case(r"a*+", true)]
    #[case(r"[?]++", true)]
    #[case(r"\p{N}{1,3}+", true)]
    #[case(r"\?++", true)]
    fn possessive_repetitions_are_found(#[case] expression: &str, #[case] is_found: bool) {
        assert_eq!(has_possessive(expression), is_found);
    }

    fn pieces(expression: &str, text: &str) -> Vec<String> {
        let pattern = Pattern::new(expression).unwrap();
        let mut pieces = Vec::new();
        let each = &mut |piece: &str| {
            pieces.push(piece.into());
            Ok(())
        };
        pattern.cut(&mut pattern.cache(), text, each).unwrap();
        pieces
    }

    #[test]
    fn what_is_between_matches_is_a_piece() {
        assert_eq!(pieces(r"\d{1,2}", "aé123b"), ["aé", "12", "3", "b"]);
        assert_eq!(pieces(r"b+", ""), [""; 0]);
        assert_eq!(pieces(r"b+", "é"), ["é"]);
    }

    #[test]
    fn the_last_space_goes_to_what_follows() {
        let expression = r" ?[a-z]+|\s+(?!\S)|\s+";
        let found = pieces(expression, "  a \u{3000}\u{a0}-   b ");
        assert_eq!(
            found,
            [" ", " a", " \u{3000}", "\u{a0}", "-", "  ", " b", " "]
        );
    }
}
