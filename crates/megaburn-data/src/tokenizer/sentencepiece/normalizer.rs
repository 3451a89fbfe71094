use super::{
    super::trie::Trie,
    SPACE,
    charsmap::CharsMap,
    proto::{Kind, SentencePieceModel},
};

/// Changes a text as its model says: maps characters, removes and adds spaces, and writes spaces as
/// [`SPACE`].
#[derive(Clone, Debug)]
pub(in super::super) struct PieceNormalizer {
    charsmap: CharsMap,
    /// Strings that are not mapped.
    user_defined: Trie,
    add_dummy_prefix: bool,
    remove_extra_spaces: bool,
    escape_spaces: bool,
    space_is_suffix: bool,
    /// Whether only the first part of a text gets the dummy prefix, not each part after a token.
    first_only: bool,
}

impl PieceNormalizer {
    /// The normalizer of a model.
    ///
    /// # Errors
    /// Its map of characters is damaged.
    pub(in super::super) fn new(
        model: &SentencePieceModel,
        first_only: bool,
    ) -> Result<Self, String> {
        let spec = &model.normalizer;
        Ok(Self {
            charsmap: CharsMap::parse(&spec.charsmap)?,
            user_defined: user_defined(model),
            add_dummy_prefix: spec.add_dummy_prefix,
            remove_extra_spaces: spec.remove_extra_spaces,
            escape_spaces: spec.escape_spaces,
            space_is_suffix: model.space_is_suffix,
            first_only,
        })
    }

    /// The normalized text. `is_first` says whether it begins the whole text.
    pub(in super::super) fn normalize(&self, text: &str, is_first: bool) -> String {
        let mut rest = text;
        if self.remove_extra_spaces {
            while let (length @ 1.., " ") = self.prefix(rest) {
                rest = &rest[length..];
            }
        }
        let mut normalized = String::new();
        if rest.is_empty() {
            return normalized;
        }
        let space = if self.escape_spaces { SPACE } else { ' ' };
        let adds_space = self.add_dummy_prefix && (is_first || !self.first_only);
        if adds_space && !self.space_is_suffix {
            normalized.push(space);
        }
        let mut after_space = self.remove_extra_spaces;
        while !rest.is_empty() {
            let (length, mut mapped) = self.prefix(rest);
            if after_space {
                mapped = mapped.trim_start_matches(' ');
            }
            let spaced = |c| if c == ' ' { space } else { c };
            normalized.extend(mapped.chars().map(spaced));
            if !mapped.is_empty() {
                after_space = self.remove_extra_spaces && mapped.ends_with(' ');
            }
            rest = &rest[length..];
        }
        if self.remove_extra_spaces {
            normalized.truncate(normalized.trim_end_matches(space).len());
        }
        if adds_space && self.space_is_suffix {
            normalized.push(space);
        }
        normalized
    }

    /// How many bytes of `text` are mapped together, and what they become.
    fn prefix<'a>(&'a self, text: &'a str) -> (usize, &'a str) {
        if let Some((length, _)) = self.user_defined.longest(text.as_bytes()) {
            return (length, &text[..length]);
        }
        if let Some((length, mapped)) = self.charsmap.longest(text.as_bytes())
            && text.is_char_boundary(length)
        {
            return (length, mapped);
        }
        let length = text.chars().next().map_or(0, char::len_utf8);
        (length, &text[..length])
    }
}

/// The strings that always become a token of their own.
pub(in super::super) fn user_defined(model: &SentencePieceModel) -> Trie {
    let pieces = (0..).zip(&model.pieces);
    let pieces = pieces.filter(|(_, piece)| piece.kind == Kind::UserDefined);
    Trie::new(pieces.map(|(id, piece)| (piece.text.as_str(), id)))
}
