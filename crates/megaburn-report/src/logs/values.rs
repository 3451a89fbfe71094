//! The values of a record by name, as `metrics.jsonl` has them.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::metrics::MetricsRecord;

/// The fields that say what a record is about.
const ABOUT: [&str; 4] = ["step", "wall_time", "start_number", "data"];

/// The values of a record. Those inside of objects and lists have the names of the outer ones
/// first, as in `experts/busiest/0`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Values {
    /// The step that the record is about.
    pub(super) step: u64,
    /// When it was measured, in seconds since 1970; earlier versions did not record it.
    pub(super) wall_time: Option<f64>,
    /// The start of the run that measured it.
    pub(super) start_number: Option<u64>,
    /// The data set of an evaluation: empty for the part that is held out of the training data.
    /// `None` for a step.
    pub(super) evaluated: Option<String>,
    /// All numbers by name.
    pub(super) numbers: Vec<(String, f64)>,
}

impl Values {
    pub(super) fn of(record: &MetricsRecord) -> Self {
        let (wall_time, start_number, evaluated) = match record {
            MetricsRecord::Step(step) => (step.wall_time, step.start_number, None),
            MetricsRecord::Eval(eval) => {
                let data = eval.data.clone().unwrap_or_default();
                (eval.wall_time, eval.start_number, Some(data))
            }
        };
        let mut numbers = Vec::new();
        // A record always has a JSON form, because it is written to `metrics.jsonl`.
        if let Ok(Value::Object(fields)) = serde_json::to_value(record) {
            let fields = fields.into_iter();
            for (name, value) in fields.filter(|(name, _)| !ABOUT.contains(&name.as_str())) {
                collect(name, &value, &mut numbers);
            }
        }
        Self {
            step: record.step(),
            wall_time,
            start_number,
            evaluated,
            numbers,
        }
    }

    /// When it was measured, or else the time now.
    pub(super) fn time(&self) -> f64 {
        self.wall_time.unwrap_or_else(now)
    }

    /// All numbers by the names that are shown next to those of other runs: `train/loss`,
    /// `eval/loss` or `eval/web/loss`.
    pub(super) fn tagged(&self) -> impl Iterator<Item = (String, f64)> {
        let prefix = match self.evaluated.as_deref() {
            None => "train/".to_string(),
            Some("") => "eval/".to_string(),
            Some(data) => format!("eval/{data}/"),
        };
        self.numbers.iter().map(move |(name, number)| {
            let name = name.strip_prefix("eval_").unwrap_or(name);
            (format!("{prefix}{name}"), *number)
        })
    }
}

/// Adds the numbers of a value. What is null was not finite; texts are left out.
fn collect(name: String, value: &Value, numbers: &mut Vec<(String, f64)>) {
    match value {
        Value::Null => numbers.push((name, f64::NAN)),
        Value::Bool(is) => numbers.push((name, f64::from(u8::from(*is)))),
        Value::Number(number) => numbers.extend(number.as_f64().map(|number| (name, number))),
        Value::String(_) => {}
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                collect(format!("{name}/{index}"), item, numbers);
            }
        }
        Value::Object(fields) => {
            for (field, value) in fields {
                collect(format!("{name}/{field}"), value, numbers);
            }
        }
    }
}

/// The time, in seconds since 1970.
pub(super) fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{EvalMetrics, ExpertMetrics, StepMetrics, example_eval, example_step};

    #[test]
    fn names_are_those_of_the_metrics() {
        let mut experts = ExpertMetrics::default();
        experts.busiest.extend([1.5, 2.0]);
        let step = StepMetrics {
            loss: f64::NAN,
            experts: Some(experts),
            group_lrs: [("head.*".to_string(), 0.5)].into(),
            wall_time: Some(7.5),
            start_number: Some(2),
            ..example_step(3, 0.0)
        };
        let values = Values::of(&step.into());
        assert_eq!((values.step, values.wall_time), (3, Some(7.5)));
        let tagged: Vec<_> = values.tagged().collect();
        let of = |name: &str| tagged.iter().find(|(tag, _)| tag == name).unwrap().1;
        assert!(of("train/loss").is_nan());
        assert_eq!(of("train/experts/busiest/1"), 2.0);
        assert_eq!(of("train/group_lrs/head.*"), 0.5);
        let is_about = |(tag, _): &&(String, f64)| ABOUT.iter().any(|name| tag.ends_with(name));
        assert_eq!(tagged.iter().find(is_about), None);
    }

    #[test]
    fn evaluations_are_named_after_their_data() {
        let tag = |eval: EvalMetrics| Values::of(&eval.into()).tagged().next().unwrap();
        assert_eq!(tag(example_eval(1, 2.5)), ("eval/loss".into(), 2.5));
        let web = EvalMetrics {
            data: Some("web".into()),
            ..example_eval(1, 2.5)
        };
        assert_eq!(tag(web), ("eval/web/loss".into(), 2.5));
    }
}
