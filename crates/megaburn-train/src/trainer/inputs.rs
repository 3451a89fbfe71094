//! How the samples of a step become the inputs of this rank's model.

use std::ops::Range;

use megaburn_data::{Sample, Samples};

use crate::{
    config::{DataConfig, DatasetKind},
    error::TrainError,
    trainer::{
        Trainer,
        collator::{Collator, Split},
        packed_row::Document,
        stats::Work,
    },
    trainer_core::sum_over,
};

impl Trainer {
    /// Turns samples into the inputs of this rank's model.
    pub(super) fn collator(&self) -> Collator {
        let DataConfig {
            documents,
            document_multiple,
            eod_mask_loss,
            ..
        } = &self.core.config.data;
        let eos = self.data.tokenizer.eos();
        Collator {
            seq_len: self.core.config.data.seq_len,
            padded: self.core.config.row_len(&self.core.groups.layout()),
            zigzag: self.model_in_flight().zigzag(),
            documents: documents.then_some(Split {
                eos,
                multiple: *document_multiple,
            }),
            masked_eos: eod_mask_loss.then_some(eos),
            mtp_depths: self.model_config.mtp_layers,
        }
    }

    /// Whether rows have padding of their own.
    pub(super) fn pads_rows(&self) -> bool {
        self.core.config.data.documents || self.core.config.data.dataset.is_masked()
    }

    /// Number of tokens that the model read in a step: those that count in the loss or, with an
    /// encoder, which reads tokens without predicting them, all without padding.
    pub(super) fn num_read(&self, work: &Work) -> f64 {
        match self.core.config.data.dataset {
            DatasetKind::Gpt => work.tokens,
            DatasetKind::Bert | DatasetKind::T5 => work.held,
        }
    }

    /// Number of labels for each row of the next step, on average over all data-parallel ranks; 0
    /// if the model has no binary head. The loss of the binary head is multiplied by it, because
    /// gradients are divided by the number of labels. The samples are kept for the step.
    ///
    /// # Collective
    /// All data-parallel ranks.
    pub(super) fn labels_per_row(&mut self) -> Result<f64, TrainError> {
        if !self.model_config.binary_head {
            return Ok(0.0);
        }
        let batch = self.core.next_batch();
        self.step_samples.clear();
        let read = (0..batch.num_micro_batches()).map(|index| self.rows(index));
        let rows = read.collect::<Result<Vec<_>, TrainError>>()?;
        let of_rows = |(samples, counted): &(Vec<Sample>, Range<usize>)| {
            samples[counted.clone()]
                .iter()
                .map(num_labels)
                .sum::<usize>()
        };
        let labels: usize = rows.iter().map(of_rows).sum();
        self.step_samples = rows.into_iter().map(|(samples, _)| samples).collect();
        let labels = sum_over(&self.core.groups.dp, labels as f64)?;
        Ok(labels / batch.global_batch_size() as f64)
    }

    /// The documents of these samples, which all ranks know.
    pub(super) fn documents_of(
        &self,
        samples: &dyn Samples,
        numbers: Range<u64>,
    ) -> Result<Vec<Document>, TrainError> {
        let collator = self.collator();
        let of = |sample: Sample| collator.documents_of(&sample);
        Ok(samples.batch(numbers)?.into_iter().flat_map(of).collect())
    }
}

/// Number of masked tokens of a sample.
fn num_labels(sample: &Sample) -> usize {
    match sample {
        Sample::Bert(sample) => sample.loss_mask.iter().filter(|is| **is).count(),
        Sample::Tokens(_) | Sample::Documents(_) | Sample::T5(_) => 0,
    }
}
