use std::collections::HashMap;

/// The spellings of tokens by id, and their ids. Ids may have gaps.
#[derive(Clone, Debug, Default)]
pub(super) struct Vocabulary {
    tokens: Vec<Option<Box<str>>>,
    ids: HashMap<Box<str>, u32>,
}

impl Vocabulary {
    /// Gives `token` the id; `false` if the token or the id is taken.
    #[must_use]
    pub(super) fn insert(&mut self, token: &str, id: u32) -> bool {
        let index = id as usize;
        if index >= self.tokens.len() {
            self.tokens.resize(index + 1, None);
        }
        if self.tokens[index].is_some() || self.ids.contains_key(token) {
            return false;
        }
        self.tokens[index] = Some(token.into());
        self.ids.insert(token.into(), id);
        true
    }

    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    pub(super) fn token(&self, id: u32) -> Option<String> {
        let token = self.tokens.get(id as usize)?.as_ref()?;
        Some(token.to_string())
    }

    pub(super) fn ids(&self) -> HashMap<String, u32> {
        let ids = self.ids.iter();
        ids.map(|(token, id)| (token.to_string(), *id)).collect()
    }

    /// The highest id plus one.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }
}
