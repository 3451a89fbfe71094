use serde_json::json;
use xxhash_rust::xxh3::xxh3_64;

use super::{
    blend::{GreedyOrder, asked, normalize, target},
    gpt::{GptDataset, GptDatasetConfig, VERSION},
    mid_level::{MidLevelConfig, MidLevelDataset},
};
use crate::{
    error::DataError,
    index_cache::{IndexEvent, IndexFiles, NpyFile, NpyShape, NpyType, NpyWriter},
    samples::{Sample, Samples},
};

/// Megatron-LM's `mid_level_dataset_surplus` if none is given.
const SURPLUS: f64 = 0.005;
/// The most sources of a blend, because their numbers have 16 bits.
const MOST_SOURCES: usize = 32_766;

/// Builds a [`BlendedDataset`] of data sets that `C` builds.
#[derive(Clone, Debug)]
pub struct BlendedDatasetConfig<C = GptDatasetConfig> {
    config: C,
    weights: Option<Vec<f64>>,
    surplus: f64,
}

/// The samples of Megatron-LM's `BlendedDataset`: it mixes several data sets. Each sample comes
/// from the data set that is furthest behind its weight.
///
/// Megatron-LM makes a [`GptDataset`] of a single data set without weights. A single one with a
/// weight is a blend, because it is asked for the surplus.
#[derive(Debug)]
pub struct BlendedDataset<D = GptDataset> {
    datasets: Vec<D>,
    dataset_index: NpyFile,
    dataset_sample_index: NpyFile,
}

impl<C: MidLevelConfig> BlendedDatasetConfig<C> {
    /// A blend whose data sets are built with `config`, which also sets its number of samples: that
    /// of a [`GptDataset`], a [`BertDataset`](crate::BertDataset) or a
    /// [`T5Dataset`](crate::T5Dataset).
    ///
    /// Without weights each data set is read for one epoch, in proportion to its number of samples,
    /// up to the number of samples, if one is given.
    pub fn new(config: C) -> Self {
        Self {
            config,
            weights: None,
            surplus: SURPLUS,
        }
    }

    /// Weights of the data sets, of any sum. They need a number of samples, of which each data set
    /// contributes its part, rounded up.
    pub fn with_weights(self, weights: Vec<f64>) -> Self {
        let weights = Some(weights);
        Self { weights, ..self }
    }

    /// The fraction of samples that each data set is asked for beyond its part. Default: 0.005, as
    /// in Megatron-LM.
    pub fn with_surplus(self, surplus: f64) -> Self {
        Self { surplus, ..self }
    }

    /// Opens the indices of the data sets and of the blend, as their
    /// configuration does. The blend is built in a few KB of memory.
    ///
    /// # Errors
    /// - A data set cannot be built.
    /// - There are no data sets or too many, a weight is not positive, or there are weights and no
    ///   number of samples.
    /// - A data set would be read for more samples than it was asked for.
    pub fn build(
        &self,
        sources: &[C::Source],
        mut report: impl FnMut(IndexEvent),
    ) -> Result<BlendedDataset<C::Dataset>, DataError> {
        self.check(sources.len())?;
        let num_samples = self.config.num_samples();
        // With weights: the part of each source, and the number that it is asked for.
        let mut targets = 0u64;
        let mut numbers = vec![None; sources.len()];
        let weights = self.weights.as_deref().map(normalize);
        if let (Some(weights), Some(num_samples)) = (&weights, num_samples) {
            let each = weights.iter().map(|w| target(num_samples, *w));
            targets = each.fold(0, u64::saturating_add);
            let asked = weights.iter().map(|w| asked(num_samples, *w, self.surplus));
            numbers = asked.map(Some).collect();
        }
        let datasets = sources.iter().zip(numbers).map(|(source, number)| {
            let config = self.config.clone().with_samples_of(number);
            config.build_for_blend(source, &mut report)
        });
        let datasets = datasets.collect::<Result<Vec<_>, _>>()?;

        let sizes: Vec<u64> = datasets.iter().map(MidLevelDataset::size).collect();
        let total: u64 = sizes.iter().sum();
        let by_sizes = || sizes.iter().map(|size| *size as f64).collect::<Vec<_>>();
        // Weights are normalized by the builder, and again by the blend.
        let (order, length) = match (weights, num_samples) {
            (Some(weights), _) => (GreedyOrder::weighted(normalize(&weights)), targets),
            (None, Some(num_samples)) => {
                let weights = normalize(&by_sizes());
                (GreedyOrder::weighted(weights), num_samples.min(total))
            }
            (None, None) => (GreedyOrder::exhaustive(sizes.clone()), total),
        };
        let [dataset_index, dataset_sample_index] =
            self.open(sources, &sizes, order, length, &mut report)?;
        Ok(BlendedDataset {
            datasets,
            dataset_index,
            dataset_sample_index,
        })
    }

    fn check(&self, num_sources: usize) -> Result<(), DataError> {
        let bad = |why: String| Err(DataError::Blend { why });
        if num_sources == 0 || num_sources > MOST_SOURCES {
            return bad(format!(
                "there are {num_sources}; give 1 to {MOST_SOURCES} data sets"
            ));
        }
        if self.config.num_samples() == Some(0) {
            let what = "the number of samples";
            return Err(DataError::Zero { what });
        }
        if !(self.surplus.is_finite() && self.surplus >= 0.0) {
            let surplus = self.surplus;
            return bad(format!(
                "the surplus is {surplus}; give a fraction like 0.005"
            ));
        }
        let Some(weights) = &self.weights else {
            return Ok(());
        };
        if weights.len() != num_sources {
            let count = weights.len();
            return bad(format!(
                "there are {count} weights for {num_sources} data sets; give each one a weight"
            ));
        }
        if let Some(weight) = weights.iter().find(|w| !(w.is_finite() && **w > 0.0)) {
            return bad(format!(
                "{weight} is not a positive weight; leave a data set out that is not to be read"
            ));
        }
        if !weights.iter().sum::<f64>().is_finite() {
            return bad("the sum of the weights is infinite; give smaller ones".into());
        }
        if self.config.num_samples().is_none() {
            return bad("weights need a number of samples; give both or none".into());
        }
        Ok(())
    }

    /// Opens or builds the index of a blend of `length` samples in this order.
    fn open(
        &self,
        sources: &[C::Source],
        sizes: &[u64],
        order: GreedyOrder,
        length: u64,
        report: &mut dyn FnMut(IndexEvent),
    ) -> Result<[NpyFile; 2], DataError> {
        // Without weights the order follows from the sizes.
        let description = json!({
            "class": "BlendedDataset",
            "version": VERSION,
            "weights": self.weights,
            "sizes": sizes,
            "num_samples": length,
        });
        let shape = |of| NpyShape {
            of,
            rows: Some(length),
            row_len: 1,
        };
        let arrays = [
            ("dataset_index", shape(NpyType::I16)),
            ("dataset_sample_index", shape(NpyType::I64)),
        ];
        let building = IndexEvent::Building {
            name: format!("a blend of {} data sets", sources.len()),
            num_samples: length,
        };
        let write = |out: &mut [NpyWriter; 2]| {
            let [dataset_index, dataset_sample_index] = out;
            // The length fits, because an index of it is on the disk soon.
            for (source, sample) in order.take(length as usize) {
                if sample >= sizes[source] {
                    return Err(DataError::Oversampled {
                        name: C::name_of(&sources[source]),
                        num_samples: sizes[source],
                        surplus: self.surplus,
                    });
                }
                dataset_index.push(source as i64)?;
                dataset_sample_index.push(sample as i64)?;
            }
            Ok(())
        };
        let files = IndexFiles::new(self.config.cache(), &description, arrays);
        files.open_or_build(report, building, write)
    }
}

impl<D: MidLevelDataset> BlendedDataset<D> {
    /// The data sets of the blend, in the order in which they were given.
    pub fn datasets(&self) -> &[D] {
        &self.datasets
    }

    /// Number of samples.
    pub fn num_samples(&self) -> u64 {
        self.dataset_index.rows()
    }

    /// A hash of what decides the order in addition to the data and the settings.
    pub fn order_hash(&self) -> u64 {
        let of_sources = self.datasets.iter().map(MidLevelDataset::hash_of_order);
        xxh3_64(&of_sources.flat_map(u64::to_le_bytes).collect::<Vec<_>>())
    }

    /// Sample `index`.
    ///
    /// # Errors
    /// There is no such sample, or files cannot be read.
    pub fn sample(&self, index: u64) -> Result<D::Sample, DataError> {
        let (dataset, sample) = self.position(index)?;
        self.datasets[dataset].read(sample)
    }

    /// The number of the data set that sample `index` is from, and its number there.
    ///
    /// # Errors
    /// There is no such sample, or the index cannot be read.
    pub fn position(&self, index: u64) -> Result<(usize, u64), DataError> {
        let num_samples = self.num_samples();
        if index >= num_samples {
            return Err(DataError::NoSample {
                name: format!("a blend of {} data sets", self.datasets.len()),
                index,
                num_samples,
            });
        }
        let dataset = self.dataset_index.numbers(index, 1)?[0];
        let sample = self.dataset_sample_index.numbers(index, 1)?[0];
        let known = usize::try_from(dataset).ok();
        let known = known.filter(|dataset| *dataset < self.datasets.len());
        let dataset = known.ok_or_else(|| {
            let count = self.datasets.len();
            let why = format!("it names data set {dataset} of {count}");
            self.dataset_index.damaged(why)
        })?;
        let count = self.datasets[dataset].size();
        let in_range = u64::try_from(sample).ok().filter(|sample| *sample < count);
        let sample = in_range.ok_or_else(|| {
            let why = format!("it names sample {sample} of {count} of data set {dataset}");
            self.dataset_sample_index.damaged(why)
        })?;
        Ok((dataset, sample))
    }
}

impl<D> Samples for BlendedDataset<D>
where
    D: MidLevelDataset<Sample: Into<Sample>> + Send + Sync,
{
    fn order_hash(&self) -> u64 {
        self.order_hash()
    }

    fn num_samples(&self) -> u64 {
        self.num_samples()
    }

    fn sample(&self, index: u64) -> Result<Sample, DataError> {
        Ok(self.sample(index)?.into())
    }
}
