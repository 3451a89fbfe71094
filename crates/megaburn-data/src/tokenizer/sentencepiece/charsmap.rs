use std::str::from_utf8;

/// A map of strings to strings in the form that SentencePiece compiles: the units of a double-array
/// trie, whose values are positions in a list of strings that end with NUL.
///
/// Sources: SentencePiece `src/normalizer.cc`; the format of Darts-clone
/// (<https://github.com/s-yata/darts-clone>, `include/darts.h`).
#[derive(Clone, Debug, Default)]
pub(super) struct CharsMap {
    units: Vec<u32>,
    texts: String,
}

impl CharsMap {
    /// Reads the map; none is an empty one.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        let cut = || "its map of characters was cut".to_string();
        let (length, rest) = bytes.split_first_chunk::<4>().ok_or_else(cut)?;
        let length = u32::from_le_bytes(*length) as usize;
        let (trie, texts) = rest.split_at_checked(length).ok_or_else(cut)?;
        if length == 0 || !length.is_multiple_of(4) {
            return Err(format!(
                "its map of characters has a trie of {length} bytes"
            ));
        }
        let units = trie.chunks_exact(4).map(|unit| {
            let unit = unit.iter().rev();
            unit.fold(0, |value, &byte| value << 8 | u32::from(byte))
        });
        let texts =
            from_utf8(texts).map_err(|_| "its map of characters is not UTF-8".to_string())?;
        Ok(Self {
            units: units.collect(),
            texts: texts.into(),
        })
    }

    /// The longest string of the map that `text` begins with, as its length and what it becomes.
    pub(super) fn longest(&self, text: &[u8]) -> Option<(usize, &str)> {
        let mut node = offset(*self.units.first()?);
        let mut found = None;
        for (index, &byte) in text.iter().enumerate() {
            node ^= usize::from(byte);
            let Some(&unit) = self.units.get(node) else {
                break;
            };
            // A unit with the highest bit set is a value, not the child for a byte.
            if unit & (1 << 31 | 0xFF) != u32::from(byte) {
                break;
            }
            node ^= offset(unit);
            if unit >> 8 & 1 == 1
                && let Some(&value) = self.units.get(node)
            {
                found = Some((index + 1, value & !(1 << 31)));
            }
        }
        let (length, at) = found?;
        let text = self.texts.get(at as usize..)?;
        Some((length, text.split('\0').next()?))
    }
}

/// The distance of a unit to its children.
fn offset(unit: u32) -> usize {
    ((unit >> 10) << ((unit & 1 << 9) >> 6)) as usize
}
