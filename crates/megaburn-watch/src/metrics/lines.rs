//! The measurements and events of lines.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{events::Events, mark::Sums, thin::Point};

/// Keys of a step that are no measurements: what a point counts in, and what is shown in another
/// way.
const NO_SERIES: [&str; 5] = [
    "step",
    "consumed_tokens",
    "wall_time",
    "start_number",
    "precision",
];

/// Of a list with more items, only the extremes are kept.
const MOST_ITEMS: usize = 8;

/// The last measurements of layers, as they stand in the file.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Layers {
    experts: Option<Value>,
    precision: Option<Value>,
}

/// Collects lines.
#[derive(Debug, Default)]
pub(super) struct Lines {
    pub(super) series: BTreeMap<String, Vec<Point>>,
    pub(super) events: Events,
    pub(super) sums: Sums,
    pub(super) layers: Layers,
    step: u64,
    recipe: Option<String>,
}

impl Lines {
    /// Continues after lines with these sums.
    pub(super) fn new(sums: Sums) -> Self {
        Self {
            sums,
            ..Self::default()
        }
    }

    /// Adds a line. What is no JSON object is skipped, as all readers of the file do.
    pub(super) fn add(&mut self, line: &[u8]) {
        if line.is_empty() {
            return;
        }
        let Ok(Value::Object(line)) = serde_json::from_slice(line) else {
            return;
        };
        match line.get("step").and_then(Value::as_u64) {
            Some(step) if line.contains_key("loss") => self.add_step(step, &line),
            Some(step) if line.contains_key("eval_loss") => self.add_eval(step, &line),
            _ => {
                if line.contains_key("start") {
                    self.sums.wall_time = 0.0;
                }
                self.events.add_line(&line, self.step, &self.sums);
            }
        }
    }

    fn add_step(&mut self, step: u64, line: &Map<String, Value>) {
        self.step = step;
        self.add_sums(line);
        // A step whose loss or gradient was not finite has no other measurements.
        let failed = ["loss", "grad_norm"]
            .iter()
            .any(|key| line.get(*key) == Some(&Value::Null));
        let is_cut = failed && line.get("tokens").and_then(Value::as_u64) == Some(0);
        if failed {
            let text = "the loss or the gradient is not finite".to_string();
            self.events.add(step, &self.sums, "not finite", text);
        } else if line.get("skipped") == Some(&Value::Bool(true)) {
            let text = "the step was skipped: its gradient overflowed or exceeded the threshold";
            self.events
                .add(step, &self.sums, "skipped", text.to_string());
        }
        let mut name = String::new();
        for (key, value) in line {
            let is_kept = !is_cut || ["loss", "grad_norm"].contains(&key.as_str());
            if is_kept && !NO_SERIES.contains(&key.as_str()) {
                self.add_value(&mut name, key, value, step);
            }
        }
        let precision = line.get("precision").and_then(Value::as_object);
        if let Some(precision) = precision {
            self.add_precision(step, precision);
        }
        // Steps with measurements of layers are rare, so the last one of each kind is kept.
        if let Some(layers) = precision.and_then(|precision| precision.get("layers")) {
            self.layers.precision = Some(json!({ "step": step, "layers": layers }));
        }
        if let Some(experts) = line.get("experts") {
            self.layers.experts = Some(json!({ "step": step, "experts": experts }));
        }
    }

    fn add_eval(&mut self, step: u64, line: &Map<String, Value>) {
        let data = line.get("data").and_then(Value::as_str);
        let of = data.map_or(String::new(), |data| format!(":{data}"));
        for (key, value) in line {
            let name = match key.as_str() {
                "data" => continue,
                "eval_loss" => format!("eval_loss{of}"),
                key if NO_SERIES.contains(&key) => continue,
                key => format!("eval {key}{of}"),
            };
            self.add_value(&mut String::new(), &name, value, step);
        }
    }

    /// Adds the tokens and seconds of a step.
    fn add_sums(&mut self, line: &Map<String, Value>) {
        let number = |key: &str| line.get(key).and_then(Value::as_f64);
        let tokens = number("tokens").unwrap_or(0.0);
        let rate = number("tokens_per_second").filter(|rate| *rate > 0.0);
        self.sums.tokens = number("consumed_tokens").unwrap_or(self.sums.tokens + tokens);
        let own = rate.map_or(0.0, |rate| tokens / rate);
        let wall_time = number("wall_time").unwrap_or(0.0);
        let since = wall_time - self.sums.wall_time;
        // The first step of a start has no line before it to count from.
        let is_next = self.sums.wall_time > 0.0 && since > 0.0;
        self.sums.seconds += if is_next { since } else { own };
        self.sums.wall_time = wall_time;
    }

    /// Adds a value under `name.key`: a number, the numbers of an object, or those of a list.
    fn add_value(&mut self, name: &mut String, key: &str, value: &Value, step: u64) {
        let len = name.len();
        if len > 0 {
            name.push('.');
        }
        name.push_str(key);
        match value {
            Value::Number(number) => self.push(name, step, number.as_f64().unwrap_or(f64::NAN)),
            Value::Null => self.push(name, step, f64::NAN),
            Value::Object(object) => {
                for (key, value) in object {
                    self.add_value(name, key, value, step);
                }
            }
            Value::Array(items) => self.add_items(name, key, items, step),
            Value::Bool(_) | Value::String(_) => {}
        }
        name.truncate(len);
    }

    fn add_items(&mut self, name: &mut String, key: &str, items: &[Value], step: u64) {
        let numbers = || items.iter().filter_map(Value::as_f64);
        let (smallest, largest) = (numbers().reduce(f64::min), numbers().reduce(f64::max));
        let (Some(smallest), Some(largest)) = (smallest, largest) else {
            return;
        };
        // Experts' load: the layer that is worst off.
        match key {
            "busiest" => self.push(name, step, largest),
            "idlest" => self.push(name, step, smallest),
            _ if items.len() <= MOST_ITEMS => {
                for (number, item) in items.iter().enumerate() {
                    self.add_value(name, &(number + 1).to_string(), item, step);
                }
            }
            _ => {
                self.push(&format!("{name}.min"), step, smallest);
                self.push(&format!("{name}.max"), step, largest);
            }
        }
    }

    /// Adds the largest share over all layers and matrices, and what changed.
    fn add_precision(&mut self, step: u64, precision: &Map<String, Value>) {
        let layers = precision.get("layers").and_then(Value::as_object);
        for share in ["saturated", "underflowed"] {
            let matrices = layers
                .into_iter()
                .flat_map(Map::values)
                .filter_map(Value::as_object);
            let shares = matrices
                .flat_map(Map::values)
                .filter_map(|matrix| matrix[share].as_f64());
            if let Some(largest) = shares.reduce(f64::max) {
                self.push(&format!("precision.{share}"), step, largest);
            }
        }
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let list = |key: &str| {
            precision
                .get(key)
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
        };
        for fallback in list("fallbacks") {
            let what = format!(
                "{}: not quantised until step {}, because {}{} is {} (bound {})",
                text(&fallback["layer"]),
                fallback["until_step"],
                fallback["matrix"]
                    .as_str()
                    .map_or(String::new(), |matrix| format!("{matrix} ")),
                text(&fallback["cause"]),
                fallback["value"],
                fallback["bound"],
            );
            self.events.add(step, &self.sums, "fall-back", what);
        }
        for layer in list("ended_fallbacks") {
            let what = format!("{}: quantised again", text(layer));
            self.events.add(step, &self.sums, "fall-back ended", what);
        }
        let recipe = precision.get("recipe").and_then(Value::as_str);
        if let Some(recipe) = recipe.filter(|recipe| self.recipe.as_deref() != Some(recipe)) {
            self.events
                .add(step, &self.sums, "recipe", recipe.to_string());
            self.recipe = Some(recipe.to_string());
        }
    }

    fn push(&mut self, name: &str, step: u64, value: f64) {
        let Sums {
            tokens, seconds, ..
        } = self.sums;
        let point = Point {
            step,
            tokens,
            seconds,
            value,
        };
        match self.series.get_mut(name) {
            Some(points) => points.push(point),
            None => drop(self.series.insert(name.to_string(), vec![point])),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn lines(lines: &[Value]) -> Lines {
        let mut found = Lines::new(Sums::default());
        for line in lines {
            found.add(line.to_string().as_bytes());
        }
        found
    }

    fn last(lines: &Lines, name: &str) -> f64 {
        lines.series[name].last().unwrap().value
    }

    #[test]
    fn numbers_have_names_and_lists_their_extremes() {
        let found = lines(&[
            json!({"step": 3, "loss": 2.5, "mtp_losses": [1.0, null], "task": {"kl": 0.5},
                "experts": {"aux_loss": 1.25, "busiest": [1.5, 3.0], "idlest": [0.5, 0.25]},
                "many": (0..20).collect::<Vec<_>>(), "skipped": true}),
            json!({"step": 3, "eval_loss": 2.0, "task": {"kl": 0.25}}),
            json!({"step": 3, "eval_loss": 1.5, "data": "code"}),
        ]);
        let names: Vec<_> = found.series.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            [
                "eval task.kl",
                "eval_loss",
                "eval_loss:code",
                "experts.aux_loss",
                "experts.busiest",
                "experts.idlest",
                "loss",
                "many.max",
                "many.min",
                "mtp_losses.1",
                "mtp_losses.2",
                "task.kl"
            ]
        );
        assert_eq!(
            (
                last(&found, "experts.busiest"),
                last(&found, "experts.idlest")
            ),
            (3.0, 0.25)
        );
        assert_eq!(
            (last(&found, "many.max"), last(&found, "eval_loss:code")),
            (19.0, 1.5)
        );
        assert!(last(&found, "mtp_losses.2").is_nan());
        assert_eq!(found.layers.experts.unwrap()["experts"]["busiest"][1], 3.0);
        assert_eq!(found.events.kept()[0].kind, "skipped");
    }

    #[test]
    fn a_step_that_is_not_finite_has_no_zeros() {
        let found =
            lines(&[json!({"step": 3, "loss": null, "grad_norm": null, "lr": 0.0, "tokens": 0})]);
        assert_eq!(
            found.series.keys().collect::<Vec<_>>(),
            ["grad_norm", "loss"]
        );
        assert!(last(&found, "loss").is_nan());
        assert_eq!(found.events.kept()[0].kind, "not finite");
    }

    #[test]
    fn the_precision_of_the_worst_layer_counts() {
        let layer = |saturated: f64| json!({"input": {"saturated": saturated, "underflowed": 0.0, "amax": 1.0}});
        let fallback = json!({"layer": "a", "matrix": "input", "cause": "saturated", "value": 0.5,
            "bound": 0.1, "until_step": 9});
        let found = lines(&[
            json!({"step": 1, "loss": 1.0, "precision": {"recipe": "delayed", "layers": {"a": layer(0.5), "b": layer(0.25)},
                "fallbacks": [fallback]}}),
            json!({"step": 2, "loss": 1.0, "precision": {"recipe": "delayed", "ended_fallbacks": ["a"]}}),
            json!({"step": 3, "loss": 1.0, "experts": {"busiest": [1.0]}, "precision": {"recipe": "bf16"}}),
        ]);
        assert_eq!(last(&found, "precision.saturated"), 0.5);
        let Layers { experts, precision } = &found.layers;
        assert_eq!(experts.as_ref().unwrap()["step"], 3);
        assert_eq!(precision.as_ref().unwrap()["step"], 1);
        let events = found.events.kept();
        let kinds: Vec<_> = events
            .iter()
            .map(|event| (event.step, event.kind))
            .collect();
        assert_eq!(
            kinds,
            [
                (1, "fall-back"),
                (1, "recipe"),
                (2, "fall-back ended"),
                (3, "recipe")
            ]
        );
        let text = "a: not quantised until step 9, because input saturated is 0.5 (bound 0.1)";
        assert_eq!(events[0].text, text);
    }

    #[test]
    fn time_counts_within_a_start() {
        let step = |step: u64, time: f64| {
            json!({"step": step, "loss": 1.0, "tokens": 8, "tokens_per_second": 4.0,
            "wall_time": time, "consumed_tokens": 100 * step})
        };
        let start = json!({"start": 1, "from_step": 0, "layout": "tp1", "changes": []});
        let found = lines(&[
            start.clone(),
            step(1, 1000.0),
            step(2, 1005.0),
            start,
            step(3, 9000.0),
        ]);
        let seconds: Vec<_> = found.series["loss"]
            .iter()
            .map(|point| point.seconds)
            .collect();
        assert_eq!(seconds, [2.0, 7.0, 9.0]);
        assert_eq!(found.series["loss"][2].tokens, 300.0);
    }

    #[test]
    fn what_is_no_line_of_a_run_is_skipped() {
        let mut found = Lines::new(Sums::default());
        for text in ["", "my notes", "[1]", "\0\0", "{\"step\":"] {
            found.add(text.as_bytes());
        }
        assert!(found.series.is_empty() && found.events.kept().is_empty());
    }
}
