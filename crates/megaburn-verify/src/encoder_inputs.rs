//! What an encoder reads besides tokens and labels.

use std::{ops::Range, sync::Arc};

use burn::{
    prelude::{Device, Int},
    tensor::{DType, Tensor, TensorData},
};
use megaburn_checkpoint::TensorFile;
use megaburn_mesh::PackedRows;
use megaburn_models::{DecoderConfig, ModelError};
use megaburn_parallel::{BatchContext, EncoderRows, PackedDocuments};
use megaburn_train::TrainError;

/// The inputs of an encoder in `reference.safetensors`, as the model of Transformers takes them;
/// each is `None` if the file lacks it.
#[derive(Debug, Default)]
pub(crate) struct EncoderInputs {
    /// `token_type_ids`, by row.
    types: Option<Vec<Vec<usize>>>,
    /// The number of tokens of each row before its padding, from `attention_mask`.
    lens: Option<Vec<usize>>,
    /// `next_sentence_label`, by row.
    order: Option<Vec<i64>>,
    /// The number of positions of the encoder of an encoder-decoder model, which come first in the
    /// tokens; `None` in other models.
    encoder: Option<usize>,
}

impl EncoderInputs {
    /// Reads and checks the inputs that go with the `tokens` of the encoder, `[B, S]`.
    ///
    /// # Errors
    /// An input has another shape or type, or values that the model does not have; padding is not
    /// at the end of a row.
    pub(crate) fn read(
        file: &TensorFile,
        model: &DecoderConfig,
        tokens: &TensorData,
    ) -> Result<Self, TrainError> {
        let [rows, seq_len] = [tokens.shape()[0], tokens.shape()[1]];
        let fail = |name: &str, why: String| ModelError::Tensor {
            path: file.path().to_path_buf(),
            name: name.into(),
            why,
        };
        let read = |name: &str, shape: &[usize], most: usize| -> Result<_, TrainError> {
            if !file.contains(name) {
                return Ok(None);
            }
            let data = file.read(name)?;
            if data.shape().to_vec() != shape || data.dtype() != DType::I64 {
                let (found, dtype) = (data.shape(), data.dtype());
                let why = format!("expected {shape:?} in I64, found {found:?} in {dtype:?}");
                return Err(fail(name, why).into());
            }
            let values: Vec<i64> = data.iter::<i64>().collect();
            if let Some(value) = values.iter().find(|v| !(0..=most as i64).contains(*v)) {
                let why = format!("contains {value}, expected 0 to {most}");
                return Err(fail(name, why).into());
            }
            Ok(Some(values))
        };
        let by_row = |all: Vec<i64>| -> Vec<Vec<usize>> {
            let row = |row: &[i64]| row.iter().map(|id| *id as usize).collect();
            all.chunks(seq_len).map(row).collect()
        };
        let most = model.token_types.saturating_sub(1);
        let types = read("token_type_ids", &[rows, seq_len], most)?;
        let mask = read("attention_mask", &[rows, seq_len], 1)?.map(by_row);
        let len = |row: &Vec<usize>| {
            let len = row.iter().sum::<usize>();
            let is_first = row[..len].iter().all(|of| *of == 1);
            let why = "has padding before tokens; padding must be at the end of rows";
            is_first
                .then_some(len)
                .ok_or_else(|| fail("attention_mask", why.into()))
        };
        let lens = mask.map(|mask| mask.iter().map(len).collect::<Result<Vec<_>, _>>());
        let lens = lens.transpose()?;
        Ok(Self {
            types: types.filter(|_| model.token_types > 0).map(by_row),
            lens: lens.filter(|lens| lens.iter().any(|len| *len < seq_len)),
            order: read("next_sentence_label", &[rows], 1)?.filter(|_| model.binary_head),
            encoder: model.is_encoder_decoder().then_some(seq_len),
        })
    }

    /// The number of positions of the encoder of an encoder-decoder model.
    pub(crate) fn encoder_len(&self) -> Option<usize> {
        self.encoder
    }

    /// The inputs of `rows`, of `seq_len` tokens each.
    pub(crate) fn context(
        &self,
        rows: Range<usize>,
        seq_len: usize,
        device: &Device,
    ) -> Result<BatchContext, TrainError> {
        if let Some(len) = self.encoder {
            let held = self.lens.as_ref().map(|lens| Arc::from(&lens[rows]));
            return Ok(BatchContext {
                encoder: Some(EncoderRows::new(len, held)),
                ..BatchContext::default()
            });
        }
        // Padding is a document of its own, which the tokens do not see.
        let documents = self.lens.as_ref().map(|lens| {
            let bounds = |len: &usize| vec![0, *len, seq_len];
            PackedRows::new(lens[rows.clone()].iter().map(bounds).collect())
        });
        let documents = documents.transpose().map_err(ModelError::from)?;
        let order = self.order.as_ref().map(|order| {
            let own = order[rows.clone()].to_vec();
            Tensor::from_data(TensorData::new(own, [1, rows.len()]), device)
        });
        Ok(BatchContext {
            token_types: self.types.as_ref().map(|types| Arc::from(&types[rows])),
            documents: documents.map(PackedDocuments::new),
            sentence_order: order,
            ..BatchContext::default()
        })
    }

    /// 1 at tokens and 0 at padding, `[B, S]`; `None` without padding at positions with logits.
    pub(crate) fn unpadded(
        &self,
        [rows, seq_len]: [usize; 2],
        device: &Device,
    ) -> Option<Tensor<2, Int>> {
        let lens = self.lens.as_ref().filter(|_| self.encoder.is_none())?;
        let all: Vec<i64> = lens
            .iter()
            .flat_map(|len| (0..seq_len).map(move |at| i64::from(at < *len)))
            .collect();
        let all = TensorData::new(all, [rows, seq_len]);
        Some(Tensor::from_data(all, device))
    }
}
