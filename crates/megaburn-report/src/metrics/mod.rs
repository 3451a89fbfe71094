//! The measurements of each step, and `metrics.jsonl`, which records them.

mod experts;
mod journal;
mod layers;
mod line;
mod precision;
mod reader;
mod writer;

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

pub use experts::ExpertMetrics;
pub use journal::Journal;
pub use layers::{LayerStatistics, LayerStatisticsMetrics, TensorStatistics};
pub use precision::{FallbackMetrics, LayerQuantization, MatrixQuantization, PrecisionMetrics};
pub use reader::read_metrics;
pub use writer::{EvaluatedStep, FoundLines, MetricsWriter, OTHER_LINES};

/// One optimizer step: a line of `metrics.jsonl`. Non-finite numbers are written as null and read
/// back as NaN.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The step, counted from 1.
    pub step: u64,
    /// Mean cross entropy over all tokens of the step, before the update; nats per token.
    #[serde(deserialize_with = "nan_if_null")]
    pub loss: f64,
    /// Norm of the gradient of all parameters, before clipping.
    #[serde(deserialize_with = "nan_if_null")]
    pub grad_norm: f64,
    /// Learning rate of the update.
    #[serde(deserialize_with = "nan_if_null")]
    pub lr: f64,
    /// Tokens of the step that count in the loss, over all ranks.
    pub tokens: u64,
    /// Tokens per second, over all ranks: those of `tokens` or, of a model with an encoder, which
    /// reads tokens without predicting them, all without padding.
    #[serde(deserialize_with = "nan_if_null")]
    pub tokens_per_second: f64,
    /// 10^12 floating-point operations per second and rank, by Megatron-LM's formula.
    #[serde(deserialize_with = "nan_if_null")]
    pub tflops: f64,
    /// Resident memory of the largest process, in bytes.
    pub memory_bytes: u64,
    /// Model FLOPs utilization: `tflops` over the peak of the GPU. Absent on the CPU, on GPUs whose
    /// peak is not known, and where products are quantised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// The sum of `tokens` over all steps of the run up to this one. Absent if the run continues from
    /// a checkpoint that does not record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consumed_tokens: Option<u64>,
    /// Learning rates of parameters that have another one than `lr`: each group of
    /// `optimizer.groups` by its `match`, `decoupled` for `optimizer.decoupled_lr`, and `hidden` for
    /// the hidden matrices with `model.parts.mup_base_hidden`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub group_lrs: BTreeMap<String, f64>,
    /// When the step ended, in seconds since 1970 (UTC).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wall_time: Option<f64>,
    /// The start of the run that did the step: `start` of that start's line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_number: Option<u64>,
    /// The loss scale of an f16 run; `loss` and `grad_norm` do not include it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Whether the step was skipped: its gradient overflowed f16 or exceeded the threshold.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// How often the step was computed again because its loss or gradient was not finite.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub reruns: u64,
    /// Fraction of the positions that are padding, with `data.documents`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<f64>,
    /// Elements of the gradient that are zero, with `train.log_num_zeros`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_zeros: Option<u64>,
    /// Norm of all parameters after the update, with `train.log_params_norm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub params_norm: Option<f64>,
    /// Largest attention logit of any head, after the scale and before the softmax, with
    /// `optimizer.qk_clip` or `train.log_max_attention_logit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_attention_logit: Option<f64>,
    /// Multi-token prediction: the cross entropy of each depth, divided by all tokens of the step.
    /// `loss` does not include it.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "nans_if_null"
    )]
    pub mtp_losses: Vec<f64>,
    /// The mean cross entropy of the order of a row's sentences, for an encoder that predicts it
    /// (Megatron-LM's `sop loss`); nats per row. `loss` does not include it.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "some_nan_if_null"
    )]
    pub sop_loss: Option<f64>,
    /// The precision of the products, with `precision.schedule` or `precision.fallback`, or in the
    /// steps of `precision.log_interval`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<PrecisionMetrics>,
    /// Measurements of the experts, for a model that has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertMetrics>,
    /// The metrics of a model of a program's own, by name: means over its items, in place of tokens.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "named_nans_if_null"
    )]
    pub task: BTreeMap<String, f64>,
}

/// One evaluation: a line of `metrics.jsonl`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvalMetrics {
    /// The step after which the model was evaluated.
    pub step: u64,
    /// The name of the data; `None` for the part that is held out of the training data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<String>,
    /// Mean cross entropy over the validation tokens; nats per token.
    #[serde(deserialize_with = "nan_if_null")]
    pub eval_loss: f64,
    /// As in [`StepMetrics`], after the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consumed_tokens: Option<u64>,
    /// When the evaluation ended, in seconds since 1970 (UTC).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wall_time: Option<f64>,
    /// The start of the run that evaluated, as in [`StepMetrics`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_number: Option<u64>,
    /// Multi-token prediction: the cross entropy of each depth, as in [`StepMetrics`].
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "nans_if_null"
    )]
    pub mtp_losses: Vec<f64>,
    /// The mean cross entropy of the order of sentences, as in [`StepMetrics`].
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "some_nan_if_null"
    )]
    pub sop_loss: Option<f64>,
    /// The metrics of a model of a program's own, as in [`StepMetrics`].
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "named_nans_if_null"
    )]
    pub task: BTreeMap<String, f64>,
}

/// A checkpoint that was saved, as a line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckpointMetrics {
    /// The step of the checkpoint.
    pub checkpoint: u64,
    /// Seconds from its start until it was complete.
    pub seconds: f64,
    /// Seconds of these in which training waited.
    pub waited_seconds: f64,
    /// Bytes of its files; absent if they cannot be counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// A checkpoint that was uploaded to an object store, as a line of `metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StoredCheckpointMetrics {
    /// The step of the checkpoint.
    pub stored_checkpoint: u64,
    /// Its URL.
    pub url: String,
    /// Seconds from the start of the upload until it was complete.
    pub seconds: f64,
    /// Bytes of its files.
    pub bytes: u64,
}

/// A line of `metrics.jsonl` of a known kind. Readers skip other lines.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
#[expect(
    clippy::large_enum_variant,
    reason = "most records are steps, so a box would save no memory"
)]
pub enum MetricsRecord {
    /// An optimizer step.
    Step(StepMetrics),
    /// An evaluation.
    Eval(EvalMetrics),
}

impl MetricsRecord {
    /// The step that the line belongs to.
    pub fn step(&self) -> u64 {
        match self {
            Self::Step(metrics) => metrics.step,
            Self::Eval(metrics) => metrics.step,
        }
    }

    /// Parses one line, which is an evaluation if it has an `eval_loss`.
    #[cfg(test)]
    fn parse(line: &[u8]) -> Result<Self, serde_json::Error> {
        Self::from_value(serde_json::from_slice(line)?)
    }

    fn from_value(value: serde_json::Value) -> Result<Self, serde_json::Error> {
        match value.get("eval_loss") {
            Some(_) => serde_json::from_value(value).map(Self::Eval),
            None => serde_json::from_value(value).map(Self::Step),
        }
    }
}

impl From<StepMetrics> for MetricsRecord {
    fn from(metrics: StepMetrics) -> Self {
        Self::Step(metrics)
    }
}

impl From<EvalMetrics> for MetricsRecord {
    fn from(metrics: EvalMetrics) -> Self {
        Self::Eval(metrics)
    }
}

fn nan_if_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

fn nans_if_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
    let numbers: Vec<Option<f64>> = Deserialize::deserialize(deserializer)?;
    Ok(numbers
        .into_iter()
        .map(|number| number.unwrap_or(f64::NAN))
        .collect())
}

fn named_nans_if_null<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, f64>, D::Error> {
    let numbers = BTreeMap::<String, Option<f64>>::deserialize(deserializer)?;
    Ok(numbers
        .into_iter()
        .map(|(name, number)| (name, number.unwrap_or(f64::NAN)))
        .collect())
}

fn some_nan_if_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    nan_if_null(deserializer).map(Some)
}

#[cfg(test)]
pub(crate) fn example_eval(step: u64, eval_loss: f64) -> EvalMetrics {
    EvalMetrics {
        step,
        eval_loss,
        ..EvalMetrics::default()
    }
}

#[cfg(test)]
pub(crate) fn example_step(step: u64, loss: f64) -> StepMetrics {
    StepMetrics {
        step,
        loss,
        grad_norm: 1.25,
        lr: 3e-4,
        tokens: 1024,
        tokens_per_second: 12345.678,
        tflops: 0.0123,
        memory_bytes: 123 << 20,
        ..StepMetrics::default()
    }
}

/// Whether a count is left out of a line.
fn is_zero(count: &u64) -> bool {
    *count == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(record: impl Into<MetricsRecord>) -> String {
        serde_json::to_string(&record.into()).unwrap()
    }

    #[test]
    fn the_metrics_of_a_task_are_read_back() {
        let task = [
            ("accuracy".to_string(), 0.75),
            ("error".to_string(), f64::NAN),
        ];
        let step = StepMetrics {
            task: task.clone().into(),
            ..example_step(2, 1.5)
        };
        let line = json(step);
        assert!(
            line.ends_with(r#","task":{"accuracy":0.75,"error":null}}"#),
            "{line}"
        );
        let read: StepMetrics = serde_json::from_str(&line).unwrap();
        assert_eq!(read.task["accuracy"], 0.75);
        assert!(read.task["error"].is_nan());
        let eval = EvalMetrics {
            task: task.into(),
            ..example_eval(2, 1.5)
        };
        let read: EvalMetrics = serde_json::from_str(&json(eval)).unwrap();
        assert_eq!(read.task["accuracy"], 0.75);
    }

    #[test]
    fn a_line_has_the_fields_of_the_contract_in_their_order() {
        assert_eq!(
            json(example_step(1, 5.5)),
            r#"{"step":1,"loss":5.5,"grad_norm":1.25,"lr":0.0003,"tokens":1024,"tokens_per_second":12345.678,"tflops":0.0123,"memory_bytes":128974848}"#
        );
        let half = StepMetrics {
            loss_scale: Some(65536.0),
            skipped: true,
            ..example_step(1, 5.5)
        };
        assert!(
            json(half.clone())
                .ends_with(r#""memory_bytes":128974848,"loss_scale":65536.0,"skipped":true}"#)
        );
        assert_eq!(
            MetricsRecord::parse(json(half.clone()).as_bytes()).unwrap(),
            half.into()
        );
        assert_eq!(json(example_eval(2, 4.5)), r#"{"step":2,"eval_loss":4.5}"#);
        let ahead = EvalMetrics {
            mtp_losses: vec![4.75, f64::NAN],
            sop_loss: None,
            ..example_eval(2, 4.5)
        };
        let line = json(ahead);
        assert_eq!(
            line,
            r#"{"step":2,"eval_loss":4.5,"mtp_losses":[4.75,null]}"#
        );
        assert!(matches!(
            MetricsRecord::parse(line.as_bytes()),
            Ok(MetricsRecord::Eval(back)) if back.mtp_losses[0] == 4.75 && back.mtp_losses[1].is_nan()
        ));
    }

    #[test]
    fn what_older_versions_did_not_write_is_absent() {
        let old = r#"{"step":1,"loss":5.5,"grad_norm":1.25,"lr":0.0003,"tokens":1024,"tokens_per_second":12345.678,"tflops":0.0123,"memory_bytes":128974848}"#;
        let read = MetricsRecord::parse(old.as_bytes()).unwrap();
        assert_eq!(read, example_step(1, 5.5).into());
        let new = StepMetrics {
            mfu: Some(0.5),
            consumed_tokens: Some(1 << 40),
            group_lrs: [("head.*".to_string(), 1e-3)].into(),
            wall_time: Some(1_795_833_388.125),
            start_number: Some(2),
            ..example_step(1, 5.5)
        };
        let line = json(new.clone());
        let fields = r#","mfu":0.5,"consumed_tokens":1099511627776,"group_lrs":{"head.*":0.001},"wall_time":1795833388.125,"start_number":2}"#;
        assert!(line.ends_with(fields), "{line}");
        assert_eq!(MetricsRecord::parse(line.as_bytes()).unwrap(), new.into());
    }

    #[test]
    fn a_number_that_is_not_finite_is_null_and_comes_back_as_nan() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let line = json(StepMetrics {
                grad_norm: value,
                ..example_step(3, value)
            });
            assert!(line.starts_with(r#"{"step":3,"loss":null,"grad_norm":null,"lr":0.0003"#));
            let Ok(MetricsRecord::Step(back)) = MetricsRecord::parse(line.as_bytes()) else {
                panic!("{line}");
            };
            assert!(back.loss.is_nan() && back.grad_norm.is_nan() && back.lr == 3e-4);
            let line = json(example_eval(4, value));
            assert_eq!(line, r#"{"step":4,"eval_loss":null}"#);
            assert!(matches!(
                MetricsRecord::parse(line.as_bytes()),
                Ok(MetricsRecord::Eval(back)) if back.eval_loss.is_nan()
            ));
        }
    }

    #[test]
    fn numbers_come_back_to_the_bit() {
        for loss in [5.545177444479562, 1e-300, f64::from(0.1_f32), f64::MAX] {
            let record = MetricsRecord::from(example_step(u64::MAX, loss));
            assert_eq!(
                MetricsRecord::parse(json(record.clone()).as_bytes()).unwrap(),
                record
            );
        }
    }
}
