//! Which training data sets a run reads, and where each continues after a change of the list.

use megaburn_data::Blend;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;

/// The training data sets of a run and how they are mixed. It is in every checkpoint, so the order
/// of the samples stays what it was when data sets are added later.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BlendRecord {
    /// The first sample that is read in this mixture.
    pub(crate) first_sample: u64,
    /// The hash of the tokenizer, in hexadecimal digits.
    pub(crate) tokenizer: String,
    /// The data sets: first those of the configuration in its order, then those that are no longer
    /// read.
    pub(crate) sources: Vec<SourceRecord>,
}

/// A data set of a [`BlendRecord`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SourceRecord {
    pub(crate) path: String,
    /// The hash of its tokens, in hexadecimal digits.
    pub(crate) xxh3: String,
    /// The positions of the tokens that are trained on: the first one, and the end.
    pub(crate) tokens: [u64; 2],
    /// What decides the order of its samples, as [`megaburn_data::Samples::order_hash`].
    pub(crate) order_hash: u64,
    /// Its share of the samples; 0 if it is no longer read.
    pub(crate) share: f64,
    /// What its order of samples is drawn from, in addition to the seed.
    pub(crate) number: usize,
    /// How many of its samples were read before `first_sample`.
    pub(crate) num_before: u64,
}

impl BlendRecord {
    /// The record of a new run.
    pub(super) fn new(sources: Vec<SourceRecord>, tokenizer: u64) -> Self {
        Self {
            first_sample: 0,
            tokenizer: format!("{tokenizer:016x}"),
            sources,
        }
    }

    /// Compares the data sets of a run with those of `new`, which are the same ones in the same
    /// order.
    ///
    /// # Errors
    /// Which of them is read in another way, and how.
    pub(crate) fn check_same_parts(&self, new: &Self) -> Result<(), String> {
        let mut pairs = self.sources.iter().zip(&new.sources);
        pairs.try_for_each(|(before, source)| before.check_same_part(source))
    }

    /// The record of the run once it reads the data sets of `new`, which is the record of a new run,
    /// from sample `first_sample` on. Data sets that it has read before continue where they are.
    ///
    /// # Errors
    /// Why the run cannot change to them: none of its data sets is read on, or the file of one has
    /// changed.
    pub(crate) fn changed_to(
        &self,
        new: &Self,
        first_sample: u64,
        seed: u64,
    ) -> Result<Result<Self, String>, TrainError> {
        let num_read = self.num_read(first_sample, seed)?;
        let mut old: Vec<Option<SourceRecord>> = self.sources.iter().cloned().map(Some).collect();
        for (source, num_read) in old.iter_mut().flatten().zip(num_read) {
            source.num_before = num_read;
        }
        let mut next_number = self.sources.len();
        let mut sources = Vec::new();
        let mut is_kept = false;
        // Those that stay where they are come before those that were moved or copied.
        let is_same = |a: &SourceRecord, b: &SourceRecord| a.xxh3 == b.xxh3 && a.path == b.path;
        let is_moved = |a: &SourceRecord, b: &SourceRecord| a.xxh3 == b.xxh3;
        let mut known: Vec<Option<SourceRecord>> = vec![None; new.sources.len()];
        for is_it in [is_same, is_moved] {
            for (source, known) in new.sources.iter().zip(&mut known) {
                let is_it = |other: &&mut Option<SourceRecord>| {
                    other.as_ref().is_some_and(|other| is_it(other, source))
                };
                if known.is_none() {
                    *known = old.iter_mut().find(is_it).and_then(Option::take);
                }
            }
        }
        for (source, before) in new.sources.iter().zip(known) {
            if let Some(before) = before {
                is_kept |= before.share > 0.0;
                if let Err(why) = before.check_same_part(source) {
                    return Ok(Err(why));
                }
                sources.push(SourceRecord {
                    number: before.number,
                    num_before: before.num_before,
                    ..source.clone()
                });
                continue;
            }
            let mut left = old.iter().flatten();
            if left.any(|other| other.path == source.path) {
                return Ok(Err(format!("{} has changed since", source.path)));
            }
            sources.push(SourceRecord {
                number: next_number,
                ..source.clone()
            });
            next_number += 1;
        }
        if !is_kept {
            return Ok(Err("the run reads none of these data sets".into()));
        }
        sources.extend(old.into_iter().flatten().map(|source| SourceRecord {
            share: 0.0,
            ..source
        }));
        Ok(Ok(Self {
            first_sample,
            tokenizer: new.tokenizer.clone(),
            sources,
        }))
    }

    /// How many samples before sample `end` of the run are of each data set.
    fn num_read(&self, end: u64, seed: u64) -> Result<Vec<u64>, TrainError> {
        let shares: Vec<f64> = self.read().map(|source| source.share).collect();
        let counts = Blend::new(&shares, seed)?.counts(end - self.first_sample);
        let mut counts = counts.into_iter();
        let read = |source: &SourceRecord| {
            let count = if source.share > 0.0 {
                counts.next()
            } else {
                None
            };
            source.num_before + count.unwrap_or_default()
        };
        Ok(self.sources.iter().map(read).collect())
    }

    /// The data sets that are read, in the order of the configuration.
    fn read(&self) -> impl Iterator<Item = &SourceRecord> {
        self.sources.iter().filter(|source| source.share > 0.0)
    }

    /// The mixture for people: `web 70.0%, books 30.0%`. Of one that was changed to it also says
    /// where each data set continues: `web 70.0% (continues at its sample 512), code 30.0% (new)`.
    pub(crate) fn describe(&self) -> String {
        let one = |source: &SourceRecord| {
            let SourceRecord {
                path,
                share,
                num_before,
                ..
            } = source;
            let begins = match (self.first_sample, num_before) {
                (0, _) => String::new(),
                (_, 0) => " (new)".into(),
                (_, before) => format!(" (continues at its sample {before})"),
            };
            format!("{path} {:.1}%{begins}", 100.0 * share)
        };
        let all: Vec<String> = self.read().map(one).collect();
        all.join(", ")
    }
}

impl SourceRecord {
    /// Compares the record with that of the same data set in another run.
    fn check_same_part(&self, new: &Self) -> Result<(), String> {
        let Self {
            path,
            tokens,
            order_hash,
            ..
        } = self;
        if *tokens != new.tokens {
            let [mine, theirs] =
                [&new.tokens, tokens].map(|[begin, end]| format!("{begin}..{end}"));
            return Err(format!(
                "the tokens {theirs} of {path} are for training there and {mine} here; {HELD_OUT}"
            ));
        }
        if *order_hash != new.order_hash {
            return Err(format!(
                "the samples of {path} have another order, which another version of megaburn made"
            ));
        }
        Ok(())
    }
}

/// Why other tokens of a data set are trained on.
pub(crate) const HELD_OUT: &str = "the part that is held out must stay: data.split and that of the \
    entry, data.validation_fraction, and whether there is data.valid";

#[cfg(test)]
mod tests {
    use super::*;

    fn record(sources: &[(&'static str, u64, f64)]) -> BlendRecord {
        let all = sources.iter().enumerate();
        let one = |(number, (path, hash, share)): (usize, &(&str, u64, f64))| SourceRecord {
            path: path.to_string(),
            xxh3: hash.to_string(),
            tokens: [0, 1000],
            order_hash: 3,
            share: *share,
            number,
            num_before: 0,
        };
        BlendRecord::new(all.map(one).collect(), 5)
    }

    #[test]
    fn data_sets_continue_where_they_are_and_new_ones_begin() {
        let first = record(&[("web", 1, 0.75), ("books", 2, 0.25)]);
        let new = record(&[("code", 3, 0.5), ("books", 2, 0.25), ("moved/web", 1, 0.25)]);
        let changed = first.changed_to(&new, 1 << 20, 7).unwrap().unwrap();
        let of = |record: &BlendRecord| -> Vec<(String, usize, u64)> {
            let all = record.sources.iter();
            all.map(|of| (of.path.clone(), of.number, of.num_before))
                .collect()
        };
        let (web, books) = (3 << 18, 1 << 18);
        let expected = [("code", 2, 0), ("books", 1, books), ("moved/web", 0, web)];
        let expected = expected.map(|(path, number, before)| (path.to_string(), number, before));
        assert_eq!(of(&changed), expected);
        assert_eq!(
            changed.describe(),
            "code 50.0% (new), books 25.0% (continues at its sample 262144), moved/web 25.0% \
             (continues at its sample 786432)"
        );
        // The books are left out, then come back.
        let without = record(&[("code", 3, 0.5), ("moved/web", 1, 0.5)]);
        let second = changed.changed_to(&without, 3 << 20, 7).unwrap().unwrap();
        let shown = second.describe();
        assert!(shown.starts_with("code 50.0% (continues at its sample 1048576), moved/web"));
        let again = record(&[("books", 2, 1.0), ("code", 3, 1.0)]);
        let third = second.changed_to(&again, 4 << 20, 7).unwrap().unwrap();
        let expected = [
            ("books", 1, books + (1 << 19)),
            ("code", 2, (1 << 20) + (1 << 19)),
            ("moved/web", 0, web + (1 << 19) + (1 << 19)),
        ];
        let expected = expected.map(|(path, number, before)| (path.to_string(), number, before));
        assert_eq!(of(&third), expected);
    }

    #[test]
    fn other_data_is_refused() {
        let first = record(&[("web", 1, 0.75), ("books", 2, 0.25)]);
        let changed = |sources: &[(&'static str, u64, f64)]| {
            let changed = first.changed_to(&record(sources), 100, 7).unwrap();
            changed.unwrap_err()
        };
        let none = "the run reads none of these data sets";
        assert_eq!(changed(&[("code", 3, 1.0)]), none);
        let mut new = record(&[("web", 1, 1.0)]);
        new.sources[0].tokens = [0, 1001];
        let longer = first.changed_to(&new, 100, 7).unwrap().unwrap_err();
        let message = "the tokens 0..1000 of web are for training there and 0..1001 here; the part";
        assert!(longer.starts_with(message), "{longer}");
        assert_eq!(first.check_same_parts(&new).unwrap_err(), longer);
        new.sources[0].tokens = [0, 1000];
        new.sources[0].order_hash = 4;
        let other = first.changed_to(&new, 100, 7).unwrap().unwrap_err();
        assert!(other.contains("web have another order"), "{other}");
        let edited = [("web", 4, 0.5), ("books", 2, 0.5)];
        assert_eq!(changed(&edited), "web has changed since");
    }

    #[test]
    fn a_copy_does_not_take_the_place_of_a_data_set_that_is_still_read() {
        let first = record(&[("web", 1, 1.0)]);
        let new = record(&[("copy", 1, 0.5), ("web", 1, 0.5)]);
        let changed = first.changed_to(&new, 100, 7).unwrap().unwrap();
        let numbers: Vec<_> = changed
            .sources
            .iter()
            .map(|source| (source.path.as_str(), source.number, source.num_before))
            .collect();
        assert_eq!(numbers, [("copy", 1, 0), ("web", 0, 100)]);
    }
}
