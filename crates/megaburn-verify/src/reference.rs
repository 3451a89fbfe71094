use std::{fs, ops::Range, path::Path};

use burn::{
    prelude::{Device, Int},
    tensor::{DType, Tensor, TensorData},
};
use megaburn_checkpoint::{TensorFile, hf::stacked_row};
use megaburn_mesh::Layout;
use megaburn_models::{ModelError, decoder::shift_for_depth, source::ModelSource};
use megaburn_optim::Sharding;
use megaburn_parallel::{BatchContext, ContextComm};
use megaburn_train::{
    TrainError,
    config::{CpComm, OptimizerConfig, ParallelConfig},
};
use serde::Deserialize;

use crate::{
    decoder_inputs::{IGNORED, with_decoder},
    encoder_inputs::EncoderInputs,
};

/// A Hugging Face model, and what `transformers` computes with it on one batch, as written by
/// `tests/tools/hf_reference.py`.
#[derive(Debug)]
pub struct Reference {
    pub(crate) source: ModelSource,
    pub(crate) tensors: TensorFile,
    pub(crate) optimizer: OptimizerSpec,
    /// `[B, S]`; of an encoder-decoder model `[B, S_enc + S_dec]`.
    tokens: TensorData,
    /// `[B, S]`, not yet shifted; `None` if the tokens are the labels. Of an encoder-decoder model
    /// `[B, S_dec]`.
    labels: Option<TensorData>,
    encoder: EncoderInputs,
    cp_comm: CpComm,
    /// The factor on the mean loss of the multi-token-prediction depths.
    pub(crate) mtp_loss_scaling_factor: f64,
    /// The factor that the file's gradients have, which lets f16 hold them.
    gradient_scale: f32,
}

/// The object `optimizer` of `reference.json`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct OptimizerSpec {
    name: String,
    pub(crate) lr: f64,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    pub(crate) clip: Option<f64>,
}

impl OptimizerSpec {
    /// The same optimizer as the section of a configuration.
    pub(crate) fn config(&self) -> OptimizerConfig {
        OptimizerConfig {
            beta1: self.betas[0],
            beta2: self.betas[1],
            eps: self.eps,
            weight_decay: self.weight_decay,
            ..OptimizerConfig::default()
        }
    }
}

/// The losses of the reference.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ReferenceLosses {
    pub(crate) loss: Option<f64>,
    pub(crate) train: Option<Vec<f64>>,
    /// The losses of the multi-token-prediction depths, step by step.
    pub(crate) mtp: Vec<f64>,
}

#[derive(Deserialize)]
struct Meta {
    optimizer: OptimizerSpec,
    /// Present if there are `mtp_losses`.
    #[serde(default)]
    mtp_loss_scaling_factor: f64,
    #[serde(default = "unscaled")]
    gradient_scale: f32,
}

/// The factor of gradients without one.
fn unscaled() -> f32 {
    1.0
}

impl Reference {
    /// Opens a folder with `config.json`, weights, `reference.safetensors` and `reference.json`.
    ///
    /// # Errors
    /// A file is missing or damaged, the weights do not match the model, tokens are outside its
    /// vocabulary, or the optimizer is not AdamW.
    pub fn open(dir: &Path) -> Result<Self, TrainError> {
        let source = ModelSource::open(dir)?;
        let path = dir.join("reference.json");
        if !path.is_file() {
            return Err(ModelError::File {
                path: dir.to_path_buf(),
                why: "has no reference.json to verify a layout against: create one from \
                    Transformers with tests/tools/hf_reference.py; to compare two models, use \
                    `verify A B`"
                    .into(),
            }
            .into());
        }
        let text = fs::read_to_string(&path).map_err(|source| TrainError::Read {
            path: path.clone(),
            source,
        })?;
        let fail = |path: &Path, why: String| ModelError::File {
            path: path.into(),
            why,
        };
        let meta: Meta =
            serde_json::from_str(&text).map_err(|error| fail(&path, error.to_string()))?;
        if meta.optimizer.name != "AdamW" {
            let why = format!(
                "optimizer `{}` is not supported; use AdamW",
                meta.optimizer.name
            );
            return Err(fail(&path, why).into());
        }
        if !(meta.gradient_scale > 0.0 && meta.gradient_scale.is_finite()) {
            let why = format!(
                "`gradient_scale` is {}, but must be greater than 0",
                meta.gradient_scale
            );
            return Err(fail(&path, why).into());
        }
        meta.optimizer.config().adamw().init(&Sharding::none())?;
        let tensors = TensorFile::open(&dir.join("reference.safetensors"))?;
        // The model class of Transformers ignores multi-token-prediction layers.
        let source = if tensors.contains("mtp_losses") {
            source
        } else {
            source.without_mtp()
        };
        let vocab = source.config().vocab;
        let path = tensors.path().to_path_buf();
        let tokens = tensors.read("input_ids")?;
        let shape = tokens.shape().to_vec();
        let bad = |name: &str, why: String| ModelError::Tensor {
            path: path.clone(),
            name: name.into(),
            why,
        };
        if shape.len() != 2 || shape[0] == 0 || shape[1] < 2 || tokens.dtype() != DType::I64 {
            let found = tokens.dtype();
            return Err(bad(
                "input_ids",
                format!("expected [B, S] in I64, found {shape:?} in {found:?}"),
            )
            .into());
        }
        let outside = |id: &i64| *id < 0 || *id >= vocab as i64;
        let ids: Vec<i64> = tokens.try_to_vec().expect("the type was validated");
        if let Some(id) = ids.iter().find(|id| outside(id)) {
            return Err(bad(
                "input_ids",
                format!("contains {id}, but the vocabulary is {vocab}"),
            )
            .into());
        }
        if let Some(shape) = tensors.shape("train_losses")
            && (shape.len() != 1 || shape[0] == 0)
        {
            let why = format!("expected [N] with N of 1 or more, found {shape:?}");
            return Err(bad("train_losses", why).into());
        }
        let labels = tensors
            .contains("labels")
            .then(|| tensors.read("labels"))
            .transpose()?;
        let encoder = EncoderInputs::read(&tensors, source.config(), &tokens)?;
        let (tokens, shape) = if source.config().is_encoder_decoder() {
            let dir = source.hf_dir();
            let config = dir.expect("the source is a Hugging Face folder").config();
            let both = with_decoder(&tokens, &tensors, config)?;
            let rest = both.shape()[1] - shape[1];
            (both, vec![shape[0], rest])
        } else {
            (tokens, shape)
        };
        if let Some(labels) = &labels {
            if labels.shape().to_vec() != shape || labels.dtype() != DType::I64 {
                let found = labels.shape();
                let dtype = labels.dtype();
                return Err(bad(
                    "labels",
                    format!("expected {shape:?} in I64, found {found:?} in {dtype:?}"),
                )
                .into());
            }
            let ids: Vec<i64> = labels.try_to_vec().expect("the type was validated");
            if let Some(id) = ids.iter().find(|id| outside(id) && **id != IGNORED) {
                return Err(bad(
                    "labels",
                    format!("contains {id}, but the vocabulary is {vocab}"),
                )
                .into());
            }
        }
        let logits = ("logits".to_string(), vec![shape[0], shape[1], vocab]);
        let mut expected = vec![logits, ("loss".to_string(), vec![1])];
        for param in source.params() {
            for part in &param.parts {
                let dir = source
                    .hf_dir()
                    .expect("the source is a Hugging Face folder");
                let shape = dir
                    .header(&part.name)
                    .expect("the tensor was validated")
                    .shape;
                expected.push((format!("grad.{}", part.name), shape));
            }
        }
        let steps = tensors.shape("train_losses").map_or(1, |shape| shape[0]);
        expected.push((
            "mtp_losses".to_string(),
            vec![steps, source.config().mtp_layers],
        ));
        for (name, shape) in expected {
            if let Some(found) = tensors.shape(&name)
                && found != shape
            {
                return Err(bad(&name, format!("expected {shape:?}, found {found:?}")).into());
            }
        }
        let Meta {
            optimizer,
            mtp_loss_scaling_factor,
            gradient_scale,
        } = meta;
        let cp_comm = CpComm::Auto;
        Ok(Self {
            source,
            tensors,
            optimizer,
            tokens,
            labels,
            encoder,
            cp_comm,
            mtp_loss_scaling_factor,
            gradient_scale,
        })
    }

    /// Whether the model has experts.
    pub fn has_experts(&self) -> bool {
        self.source.config().experts.is_some()
    }

    /// Sets how context-parallel ranks exchange keys and values; the default is `auto`.
    pub fn with_cp_comm(self, cp_comm: CpComm) -> Self {
        Self { cp_comm, ..self }
    }

    /// The method of exchange for a layout.
    pub(crate) fn comm(&self, layout: &Layout) -> ContextComm {
        self.cp_comm
            .resolved(layout, self.source.config(), self.tokens.shape()[1])
    }

    /// Checks that a layout can split the model and the batch.
    pub(crate) fn check(&self, layout: &Layout) -> Result<(), TrainError> {
        let [batch, seq_len] = [self.tokens.shape()[0], self.tokens.shape()[1]];
        let config = self.source.config();
        match self.encoder.encoder_len() {
            Some(len) => config.check_halves(layout, [len, seq_len - len])?,
            None => {
                config.check_seq_len(seq_len)?;
                config.check_layout(layout, seq_len)?;
            }
        }
        ParallelConfig::default().splits(layout, config.layers)?;
        if !batch.is_multiple_of(layout.dp) {
            let rule = format!("a divisor of the reference's batch of {batch} samples");
            let value = layout.dp.to_string();
            return Err(TrainError::Invalid {
                key: "dp",
                value,
                rule,
            });
        }
        Ok(())
    }

    /// Tokens and labels `[B, S]`. In causal models the label of a token is the next token, and the
    /// last one has none. In an encoder-decoder model only the decoder has labels, `[B, S_dec]`.
    pub(crate) fn batch(&self, device: &Device) -> [Tensor<2, Int>; 2] {
        let tokens = Tensor::<2, Int>::from_data(self.tokens.clone(), device);
        let [batch, seq_len] = tokens.dims();
        let labels = match &self.labels {
            Some(labels) => Tensor::from_data(labels.clone(), device),
            None => tokens.clone(),
        };
        let config = self.source.config();
        if config.bidirectional || config.is_encoder_decoder() {
            return [tokens, labels];
        }
        let none = Tensor::full([batch, 1], IGNORED, device);
        let labels = Tensor::cat(vec![labels.narrow(1, 1, seq_len - 1), none], 1);
        [tokens, labels]
    }

    /// Number of rows of the batch.
    pub(crate) fn num_rows(&self) -> usize {
        self.tokens.shape()[0]
    }

    /// Number of labels that count for each row, on average.
    pub(crate) fn labels_per_row(&self) -> f64 {
        let labels = self.labels.as_ref().unwrap_or(&self.tokens);
        let counted = labels.iter::<i64>().filter(|label| *label != IGNORED);
        counted.count() as f64 / self.num_rows() as f64
    }

    /// What an encoder reads of `rows` besides tokens and labels.
    ///
    /// # Errors
    /// Does not fail for inputs that were checked.
    pub(crate) fn context(
        &self,
        rows: Range<usize>,
        device: &Device,
    ) -> Result<BatchContext, TrainError> {
        self.encoder.context(rows, self.tokens.shape()[1], device)
    }

    /// 1 at tokens and 0 at padding, `[B, S]`; `None` without padding.
    pub(crate) fn unpadded(&self, device: &Device) -> Option<Tensor<2, Int>> {
        let shape = [self.num_rows(), self.tokens.shape()[1]];
        self.encoder.unpadded(shape, device)
    }

    /// Tokens and labels `[B, S]` of each multi-token-prediction depth, for full sequences.
    pub(crate) fn ahead(&self, device: &Device) -> Vec<[Tensor<2, Int>; 2]> {
        let own = self.batch(device);
        let [batch, seq_len] = own[0].dims();
        let of_depth = |depth| {
            [(&own[0], 0), (&own[1], IGNORED)].map(|(all, none)| {
                let all: Vec<i64> = all.to_data().iter::<i64>().collect();
                let rows = all.chunks(seq_len);
                let ahead = rows.flat_map(|row| shift_for_depth(row, &[0, seq_len], depth, none));
                let ahead = TensorData::new(ahead.collect::<Vec<_>>(), [batch, seq_len]);
                Tensor::from_data(ahead, device)
            })
        };
        (1..=self.source.config().mtp_layers)
            .map(of_depth)
            .collect()
    }

    /// Numbers of the reference, if they are there.
    pub(crate) fn numbers(&self, name: &str) -> Result<Option<Vec<f32>>, TrainError> {
        if !self.tensors.contains(name) {
            return self.stacked_numbers(name);
        }
        let data = self.tensors.read(name)?.convert::<f32>();
        Ok(Some(data.try_to_vec().expect("converted to f32")))
    }

    /// The gradient of a tensor, if it is there.
    pub(crate) fn gradient(&self, name: &str) -> Result<Option<Vec<f32>>, TrainError> {
        let scaled = self.numbers(&format!("grad.{name}"))?;
        Ok(scaled.map(|all| all.into_iter().map(|x| x / self.gradient_scale).collect()))
    }

    /// The numbers of a row of a stack, such as `grad.stack[3]`, if they are there.
    fn stacked_numbers(&self, name: &str) -> Result<Option<Vec<f32>>, TrainError> {
        let Some((stack, row)) = stacked_row(name) else {
            return Ok(None);
        };
        let rows = self
            .tensors
            .shape(stack)
            .and_then(|shape| shape.first().copied());
        let (Some(rows), Some(all)) = (rows, self.numbers(stack)?) else {
            return Ok(None);
        };
        let len = all.len() / rows.max(1);
        Ok(all.chunks(len.max(1)).nth(row).map(<[f32]>::to_vec))
    }

    pub(crate) fn losses(&self) -> Result<ReferenceLosses, TrainError> {
        let wide = |numbers: Vec<f32>| numbers.into_iter().map(f64::from).collect::<Vec<f64>>();
        let loss = self.numbers("loss")?.map(wide);
        let train = self.numbers("train_losses")?.map(wide);
        let mtp = self.numbers("mtp_losses")?.map(wide).unwrap_or_default();
        Ok(ReferenceLosses {
            loss: loss.and_then(|loss| loss.first().copied()),
            train,
            mtp,
        })
    }
}
