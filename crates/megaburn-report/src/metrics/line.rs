//! The kinds of lines in `metrics.jsonl`.

use serde_json::Value;

use super::MetricsRecord;

/// The kinds of lines that a file may hold.
#[derive(Debug, PartialEq)]
pub(super) enum Line {
    /// A step or an evaluation.
    Record(Box<MetricsRecord>),
    /// A start of the run with this id.
    Start { run_id: String },
    /// A checkpoint of this step was saved or uploaded, the statistics of its layers, or a rollback
    /// after it.
    OfStep { step: u64 },
    /// Another JSON object: from a later version, or the user's own.
    Other,
    /// One of our lines, cut off when the process died, or only white space.
    Torn,
    /// Anything else.
    Foreign,
}

/// The prefixes of the lines that runs write.
const OURS: [&[u8]; 6] = [
    b"{\"step\":",
    b"{\"start\":",
    b"{\"checkpoint\":",
    b"{\"stored_checkpoint\":",
    b"{\"layer_statistics\":",
    b"{\"rollback\":",
];

impl Line {
    /// Parses one line, with its line feed if it has one.
    pub(super) fn parse(line: &[u8]) -> Self {
        let is_ours = |ours: &[u8]| line.starts_with(ours) || ours.starts_with(line);
        if line.trim_ascii().is_empty() || (!line.ends_with(b"\n") && OURS.into_iter().any(is_ours))
        {
            return Self::Torn;
        }
        let Ok(value @ Value::Object(_)) = serde_json::from_slice::<Value>(line) else {
            return Self::Foreign;
        };
        let has = |name: &str| value.get(name).is_some();
        if has("step") && (has("loss") || has("eval_loss")) {
            let record = MetricsRecord::from_value(value);
            return record.map_or(Self::Foreign, |record| Self::Record(Box::new(record)));
        }
        let of_step = [
            "checkpoint",
            "stored_checkpoint",
            "layer_statistics",
            "rollback",
        ];
        let mut steps = of_step.iter().filter_map(|name| value.get(name));
        if let Some(step) = steps.next().and_then(Value::as_u64) {
            return Self::OfStep { step };
        }
        let run_id = value
            .get("run_id")
            .and_then(Value::as_str)
            .filter(|_| has("start"));
        run_id.map_or(Self::Other, |run_id| Self::Start {
            run_id: run_id.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::metrics::example_eval;

    #[rstest]
    #[case("{\"step\":1,\"eval_loss\":2.0}\n", Line::Record(Box::new(example_eval(1, 2.0).into())))]
    #[case("{\"start\":1,\"run_id\":\"1f\"}\n", Line::Start { run_id: "1f".into() })]
    #[case("{\"checkpoint\":7,\"seconds\":0.5}\n", Line::OfStep { step: 7 })]
    #[case("{\"stored_checkpoint\":7,\"url\":\"s3://b/a\"}\n", Line::OfStep { step: 7 })]
    #[case("{\"layer_statistics\":7,\"layers\":[]}\n", Line::OfStep { step: 7 })]
    #[case("{\"rollback\":7,\"to_step\":4}\n", Line::OfStep { step: 7 })]
    #[case("{\"stored_ch", Line::Torn)]
    #[case("{\"checkpoint\":\"mine\"}\n", Line::Other)]
    #[case("{\"checkpo", Line::Torn)]
    #[case("{\"event\":\"mine\"}\n", Line::Other)]
    #[case("{\"event\":\"mine\"}", Line::Other)]
    #[case("{\"step\":2}\n", Line::Other)]
    #[case("{\"step\":1,\"eval_lo", Line::Torn)]
    #[case("{\"st", Line::Torn)]
    #[case("\n", Line::Torn)]
    #[case("my notes\n", Line::Foreign)]
    #[case("my notes", Line::Foreign)]
    #[case("\0\0\n", Line::Foreign)]
    #[case("[1]\n", Line::Foreign)]
    #[case("{\"step\":1,\"loss\":\"low\"}\n", Line::Foreign)]
    fn lines_are_told_apart(#[case] line: &str, #[case] expected: Line) {
        assert_eq!(Line::parse(line.as_bytes()), expected);
    }
}
