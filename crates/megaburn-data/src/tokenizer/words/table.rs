//! Remembers the ids of words.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64;

/// Words that are remembered. When there are as many, all are forgotten: the next ones may be of
/// another language.
const MOST_WORDS: usize = 1 << 17;
/// Bytes of the longest word that is remembered.
const LONGEST_WORD: usize = 1 << 7;

/// The ids of the last words.
#[derive(Debug, Default)]
pub(super) struct WordTable {
    /// By the hashes of the words.
    places: HashMap<u64, Place, BuildHasherDefault<Same>>,
    text: Vec<u8>,
    ids: Vec<u32>,
}

/// Where a word and its ids are.
#[derive(Debug)]
struct Place {
    text: Range<u32>,
    ids: Range<u32>,
}

impl WordTable {
    pub(super) fn get(&self, word: &str) -> Option<&[u32]> {
        let Place { text, ids } = self.places.get(&xxh3_64(word.as_bytes()))?;
        // Another word may have the same hash.
        (self.text[text.start as usize..text.end as usize] == *word.as_bytes())
            .then(|| &self.ids[ids.start as usize..ids.end as usize])
    }

    pub(super) fn insert(&mut self, word: &str, ids: &[u32]) {
        if word.len() > LONGEST_WORD {
            return;
        }
        if self.places.len() == MOST_WORDS {
            self.places.clear();
            self.text.clear();
            self.ids.clear();
        }
        // The numbers of bytes and ids are at most `MOST_WORDS * LONGEST_WORD`, or few times more.
        let place = Place {
            text: self.text.len() as u32..(self.text.len() + word.len()) as u32,
            ids: self.ids.len() as u32..(self.ids.len() + ids.len()) as u32,
        };
        self.text.extend(word.as_bytes());
        self.ids.extend(ids);
        self.places.insert(xxh3_64(word.as_bytes()), place);
    }
}

/// The hash of a number that is a hash.
#[derive(Debug, Default)]
struct Same(u64);

impl Hasher for Same {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64(bytes);
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_words_are_remembered_and_long_ones_are_not() {
        let mut table = WordTable::default();
        let ids = |number: usize| vec![number as u32; number % 3 + 1];
        let count = MOST_WORDS + 10;
        for number in 0..count {
            let word = number.to_string();
            assert_eq!(table.get(&word), None);
            table.insert(&word, &ids(number));
            assert_eq!(table.get(&word), Some(ids(number).as_slice()));
        }
        for number in MOST_WORDS..count {
            assert_eq!(table.get(&number.to_string()), Some(ids(number).as_slice()));
        }
        assert_eq!((table.places.len(), table.get("0")), (10, None));

        for length in [LONGEST_WORD, LONGEST_WORD + 1] {
            let word = "é".repeat(length)[..2 * (length / 2)].to_string() + &"x".repeat(length % 2);
            table.insert(&word, &[7]);
            assert_eq!(table.get(&word).is_some(), length == LONGEST_WORD);
        }
    }
}
