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
    /// Number of its samples in an epoch.
    pub(crate) num_samples: u64,
    /// Its share of the samples; 0 if it is no longer read.
    pub(crate) share: f64,
    /// What its order of samples is drawn from, in addition to the seed.
    pub(crate) number: usize,
    /// How many of its samples were read before `first_sample`.
    pub(crate) num_before: u64,
}

impl BlendRecord {
    /// The record of a new run. `sources` are the paths, hashes and numbers of samples of the data
    /// sets.
    pub(super) fn new<'a>(
        sources: impl Iterator<Item = (&'a str, u64, u64)>,
        shares: impl Iterator<Item = f64>,
        tokenizer: u64,
    ) -> Self {
        let one = |(number, (source, share)): (usize, ((&str, u64, u64), f64))| SourceRecord {
            path: source.0.into(),
            xxh3: format!("{:016x}", source.1),
            num_samples: source.2,
            share,
            number,
            num_before: 0,
        };
        Self {
            first_sample: 0,
            tokenizer: format!("{tokenizer:016x}"),
            sources: sources.zip(shares).enumerate().map(one).collect(),
        }
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
        for source in &new.sources {
            let find = |is_it: &dyn Fn(&SourceRecord) -> bool| {
                let mut all = old.iter();
                all.position(|other| other.as_ref().is_some_and(is_it))
            };
            let same = find(&|other| other.xxh3 == source.xxh3 && other.path == source.path);
            let moved = || find(&|other| other.xxh3 == source.xxh3);
            if let Some(at) = same.or_else(moved) {
                let before = old[at].take().expect("the position is one of a source");
                is_kept |= before.share > 0.0;
                if before.num_samples != source.num_samples {
                    return Ok(Err(format!(
                        "{} has {} training samples there and {} here; {HELD_OUT}",
                        source.path, before.num_samples, source.num_samples
                    )));
                }
                sources.push(SourceRecord {
                    number: before.number,
                    num_before: before.num_before,
                    ..source.clone()
                });
                continue;
            }
            if find(&|other| other.path == source.path).is_some() {
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

    /// The mixture for people: `web 70.0%, books 30.0%`.
    pub(crate) fn describe(&self) -> String {
        let one = |source: &SourceRecord| format!("{} {:.1}%", source.path, 100.0 * source.share);
        let all: Vec<String> = self.read().map(one).collect();
        all.join(", ")
    }
}

/// Why a data set has another number of training samples.
pub(crate) const HELD_OUT: &str = "the part that is held out of it must stay: data.split, \
    data.validation_fraction, and whether there is data.valid";

#[cfg(test)]
mod tests {
    use super::*;

    fn record(sources: &[(&'static str, u64, f64)]) -> BlendRecord {
        let names = sources.iter().map(|(path, hash, _)| (*path, *hash, 1000));
        BlendRecord::new(names, sources.iter().map(|(.., share)| *share), 5)
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
            "code 50.0%, books 25.0%, moved/web 25.0%"
        );
        // The books are left out, then come back.
        let without = record(&[("code", 3, 0.5), ("moved/web", 1, 0.5)]);
        let second = changed.changed_to(&without, 3 << 20, 7).unwrap().unwrap();
        assert_eq!(second.describe(), "code 50.0%, moved/web 50.0%");
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
        new.sources[0].num_samples = 1001;
        let longer = first.changed_to(&new, 100, 7).unwrap().unwrap_err();
        let message = "web has 1000 training samples there and 1001 here; the part that is held";
        assert!(longer.starts_with(message), "{longer}");
        let edited = [("web", 4, 0.5), ("books", 2, 0.5)];
        assert_eq!(changed(&edited), "web has changed since");
    }
}
