//! Finds places of a text that no match of an expression crosses, wherever the text begins and
//! whatever follows.

use regex_automata::{
    nfa::thompson::{NFA, State},
    util::primitives::StateID,
};

use super::pattern::Pattern;

/// Bytes before a place that are read.
const WINDOW: usize = 32;

/// The limits between words that an expression finds.
#[derive(Debug)]
pub(super) struct Limits<'p> {
    nfa: &'p NFA,
    /// All states that a match can have.
    all: States,
}

/// A set of states that read a byte or end a match.
#[derive(Clone, Debug)]
struct States {
    ids: Vec<StateID>,
    is_in: Vec<bool>,
}

impl<'p> Limits<'p> {
    pub(super) fn of(pattern: &'p Pattern) -> Self {
        let nfa = pattern.nfa();
        let mut all = States::start(nfa);
        let mut at = 0;
        while let Some(&id) = all.ids.get(at) {
            at += 1;
            match nfa.state(id) {
                State::ByteRange { trans } => all.add(nfa, trans.next),
                State::Sparse(sparse) => {
                    let transitions = sparse.transitions.iter();
                    transitions.for_each(|trans| all.add(nfa, trans.next));
                }
                State::Dense(dense) => {
                    let next = (0..=u8::MAX).filter_map(|byte| dense.matches_byte(byte));
                    next.for_each(|next| all.add(nfa, next));
                }
                _ => {}
            }
        }
        Self { nfa, all }
    }

    /// Whether a word ends between two parts of a text, and the words of both parts are those of
    /// the text, whatever stands before the one and after the other.
    ///
    /// If no match crosses the place and one begins there, the search for words comes to it. Of the
    /// matches before it the same ones are preferred as without the text after it, because none
    /// is longer. Only a run of whitespace depends on what follows it.
    pub(super) fn is_limit(&self, before: &str, after: &str) -> bool {
        let ends_solid = before.ends_with(|char: char| !char.is_whitespace());
        ends_solid && !self.crosses(before, after) && self.begins(after)
    }

    /// Whether a match could begin before a place and end after it. At the first byte that is read
    /// it could be in any state.
    fn crosses(&self, before: &str, after: &str) -> bool {
        let begin = before.floor_char_boundary(before.len().saturating_sub(WINDOW));
        let mut states = self.all.clone();
        for byte in before[begin..].bytes() {
            states.add(self.nfa, self.nfa.start_anchored());
            states = states.after(self.nfa, byte);
        }
        let first = after.chars().next().map_or(0, char::len_utf8);
        for byte in after[..first].bytes() {
            states = states.after(self.nfa, byte);
        }
        !states.ids.is_empty()
    }

    /// Whether a match is seen to begin here.
    fn begins(&self, after: &str) -> bool {
        let is_match = |id: &StateID| matches!(self.nfa.state(*id), State::Match { .. });
        let mut states = States::start(self.nfa);
        for byte in after.bytes() {
            states = states.after(self.nfa, byte);
            if states.ids.is_empty() || states.ids.iter().any(is_match) {
                break;
            }
        }
        states.ids.iter().any(is_match)
    }
}

impl States {
    fn none(nfa: &NFA) -> Self {
        Self {
            ids: Vec::new(),
            is_in: vec![false; nfa.states().len()],
        }
    }

    /// Those before the first byte of a match.
    fn start(nfa: &NFA) -> Self {
        let mut states = Self::none(nfa);
        states.add(nfa, nfa.start_anchored());
        states
    }

    /// Adds a state, or those that it stands for.
    fn add(&mut self, nfa: &NFA, id: StateID) {
        let mut open = vec![id];
        while let Some(id) = open.pop() {
            if std::mem::replace(&mut self.is_in[id.as_usize()], true) {
                continue;
            }
            match nfa.state(id) {
                State::Union { alternates } => open.extend(alternates.iter()),
                State::BinaryUnion { alt1, alt2 } => open.extend([*alt1, *alt2]),
                State::Capture { next, .. } | State::Look { next, .. } => open.push(*next),
                State::Fail => {}
                _ => self.ids.push(id),
            }
        }
    }

    /// The states after a byte.
    fn after(&self, nfa: &NFA, byte: u8) -> Self {
        let mut after = Self::none(nfa);
        for id in &self.ids {
            let next = match nfa.state(*id) {
                State::ByteRange { trans } => trans.matches_byte(byte).then_some(trans.next),
                State::Sparse(sparse) => sparse.matches_byte(byte),
                State::Dense(dense) => dense.matches_byte(byte),
                _ => None,
            };
            if let Some(next) = next {
                after.add(nfa, next);
            }
        }
        after
    }
}
