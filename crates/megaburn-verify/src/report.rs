use megaburn_train::config::Dtype;
use serde::Serialize;

use crate::{
    gradients::Difference,
    reference::{Reference, ReferenceLosses},
};

/// How far a layout may be from the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerances {
    /// Largest absolute difference of a logit.
    pub logits: f64,
    /// Absolute difference of the loss.
    pub loss: f64,
    /// Relative distance of a parameter's gradient.
    pub grad: f64,
    /// Absolute difference of the loss at a step.
    pub train: f64,
}

impl Tolerances {
    /// The usual tolerances of a model that computes in `dtype`. For bf16 they are twice the
    /// largest error that PyTorch's own bf16 has on the fixtures (`benches/peer/hf_bf16_error.py`).
    /// f16, whose rounding error is an eighth of that, has the same ones.
    pub fn of(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self {
                logits: 1e-4,
                loss: 1e-5,
                grad: 1e-3,
                train: 1e-4,
            },
            Dtype::Bf16 | Dtype::F16 => Self {
                logits: 0.1,
                loss: 4e-3,
                grad: 0.08,
                train: 1e-2,
            },
        }
    }
}

/// The result of one layout: a line of `megaburn verify --json`. A part that is not in the
/// reference is `None` and named in `skipped`; a non-finite number becomes null too.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// `model_type` of `config.json`.
    pub family: String,
    /// Canonical text of the layout.
    pub layout: String,
    /// Largest absolute difference of a logit.
    pub logits_max_abs: Option<f64>,
    /// Absolute difference of the loss.
    pub loss_abs: Option<f64>,
    /// Largest relative distance of a gradient.
    pub grad_rel_max: Option<f64>,
    /// The tensor with this distance.
    pub grad_worst: Option<String>,
    /// Largest absolute difference of the loss at a step.
    pub train_losses_max_abs: Option<f64>,
    /// Multi-token prediction: largest absolute difference of a depth's loss at a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtp_losses_max_abs: Option<f64>,
    /// The parts that are not in the reference.
    pub skipped: Vec<String>,
    /// Whether logits, loss and every gradient were compared and everything is within tolerance.
    pub ok: bool,
    /// Why there is no result.
    pub error: Option<String>,
}

impl Report {
    pub(crate) fn new(reference: &Reference, layout: String) -> Self {
        Self::empty(reference.source.config().family.to_string(), layout)
    }

    /// The report of a layout that was refused.
    pub fn refused(reference: &Reference, layout: &str, why: String) -> Self {
        let mut report = Self::new(reference, layout.to_string());
        report.refuse(why);
        report
    }

    fn empty(family: String, layout: String) -> Self {
        Self {
            family,
            layout,
            logits_max_abs: None,
            loss_abs: None,
            grad_rel_max: None,
            grad_worst: None,
            train_losses_max_abs: None,
            mtp_losses_max_abs: None,
            skipped: Vec::new(),
            ok: false,
            error: None,
        }
    }

    pub(crate) fn refuse(&mut self, why: String) {
        *self = Self {
            error: Some(why),
            ..Self::empty(self.family.clone(), self.layout.clone())
        };
    }

    /// Adds the logits of a rank.
    pub(crate) fn logits(&mut self, difference: Option<f64>) {
        match difference {
            Some(difference) => worse(&mut self.logits_max_abs, difference),
            None => self.skip("logits"),
        }
    }

    /// Adds the losses of a rank, before each update.
    pub(crate) fn losses(&mut self, expected: &ReferenceLosses, losses: &[Vec<f64>]) {
        match (expected.loss, losses.first()) {
            (Some(expected), Some(loss)) => worse(&mut self.loss_abs, (loss[0] - expected).abs()),
            _ => self.skip("loss"),
        }
        match &expected.train {
            Some(expected) => {
                for (loss, expected) in losses.iter().zip(expected) {
                    worse(&mut self.train_losses_max_abs, (loss[0] - expected).abs());
                }
            }
            None => self.skip("train_losses"),
        }
        let further = losses.iter().flat_map(|of_step| &of_step[1..]);
        for (loss, expected) in further.zip(&expected.mtp) {
            worse(&mut self.mtp_losses_max_abs, (loss - expected).abs());
        }
    }

    pub(crate) fn gradients(&mut self, found: Vec<Difference>, skipped: Vec<String>) {
        let worst = found
            .into_iter()
            .max_by(|a, b| a.relative.total_cmp(&b.relative));
        if let Some(Difference { name, relative }) = worst {
            self.grad_rel_max = Some(relative);
            self.grad_worst = Some(name);
        }
        skipped.iter().for_each(|name| self.skip(name));
    }

    pub(crate) fn judge(&mut self, tolerances: &Tolerances) {
        let Tolerances {
            logits,
            loss,
            grad,
            train,
        } = *tolerances;
        let within = |found: Option<f64>, tolerance| found.is_some_and(|found| found <= tolerance);
        self.ok = within(self.logits_max_abs, logits)
            && within(self.loss_abs, loss)
            && within(self.grad_rel_max, grad)
            && !self.skipped.iter().any(|part| part.starts_with("grad."))
            && self.train_losses_max_abs.is_none_or(|found| found <= train)
            && self.mtp_losses_max_abs.is_none_or(|found| found <= train);
    }

    fn skip(&mut self, part: &str) {
        if !self.skipped.iter().any(|known| known == part) {
            self.skipped.push(part.to_string());
        }
    }
}

/// Keeps the larger difference. NaN differs from everything.
fn worse(slot: &mut Option<f64>, found: f64) {
    let found = if found.is_nan() { f64::INFINITY } else { found };
    *slot = Some(slot.map_or(found, |worst| worst.max(found)));
}
