//! `megaburn checkpoint diff`.

use std::{collections::BTreeMap, path::PathBuf};

use clap::Args;
use megaburn_checkpoint::{
    Checkpoint, Selection, TensorComparison, TensorHeader, TensorSource, Tolerance, compare_within,
};
use megaburn_train::TrainError;
use serde_json::{Value, json};

use super::{
    super::print,
    pattern::TensorPattern,
    place,
    state_keys::by_key,
    units::{counted, shortened},
};

/// Characters of a value of the configuration or the trainer's state.
const LONGEST: usize = 60;

#[derive(Args)]
pub(in crate::cli) struct DiffArgs {
    /// A checkpoint, or a run, whose newest whole checkpoint is taken.
    #[arg(value_name = "A")]
    a: PathBuf,
    /// Another one.
    #[arg(value_name = "B")]
    b: PathBuf,
    /// Compare only the tensors whose full names match, such as `model.*`, and neither the
    /// configuration nor the trainer's state.
    #[arg(long, value_name = "PATTERN")]
    tensors: Option<TensorPattern>,
    /// Values also count as equal if |a - b| is at most ATOL + X * |b|. Element types may differ.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    rtol: Option<f64>,
    /// Values also count as equal if |a - b| is at most X + RTOL * |b|. Element types may differ.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    atol: Option<f64>,
    /// Tensors count as equal only if their element types and all bits are. This is the default.
    #[arg(long, conflicts_with_all = ["rtol", "atol"])]
    exact: bool,
    /// Print only JSON on stdout: one object per line, for each difference, and a last one with the
    /// counts.
    #[arg(long)]
    json: bool,
}

impl DiffArgs {
    /// Compares; whether all is equal.
    pub(super) fn run(self) -> Result<bool, TrainError> {
        let tolerance = self.tolerance()?;
        let [a, b] = [place::open(&self.a)?, place::open(&self.b)?];
        let selections = self.selections(&a, &b)?;
        if !self.json {
            for (name, checkpoint) in [("a", &a), ("b", &b)] {
                print::result(format!("{name}  {}", title(checkpoint)))?;
            }
        }
        let changes = match self.tensors {
            Some(_) => Vec::new(),
            None => changes(&a, &b),
        };
        for change in &changes {
            match self.json {
                true => print::result(change.json())?,
                false => print::result(change.line())?,
            }
        }
        let mut printed = Ok(());
        let mut num_tensors = 0;
        let mut num_equal = 0;
        let within = tolerance.unwrap_or_default();
        compare_within(&selections[0], &selections[1], within, |tensor| {
            num_tensors += 1;
            if is_equal(tensor, tolerance.is_some()) {
                num_equal += 1;
                return;
            }
            let line = match self.json {
                true => tensor_json(tensor).to_string(),
                false => format!("{}: {}", tensor.name, difference(tensor)),
            };
            if printed.is_ok() {
                printed = print::result(line);
            }
        })?;
        printed?;
        let num_different = num_tensors - num_equal;
        let equal = changes.is_empty() && num_different == 0;
        if self.json {
            print::result(json!({
                "kind": "summary",
                "equal": equal,
                "tensors": num_tensors,
                "different_tensors": num_different,
                "different_keys": changes.len(),
            }))?;
        } else {
            let keys = match (&self.tensors, changes.len()) {
                (Some(_), _) => String::new(),
                (None, 0) => "; configuration and state are equal".into(),
                (None, count) => format!(
                    "; {} of configuration and state {}",
                    counted(count, "key"),
                    if count == 1 { "differs" } else { "differ" }
                ),
            };
            let tensors = counted(num_tensors, "tensor");
            print::result(format!(
                "{tensors}, {num_equal} equal, {num_different} different{keys}"
            ))?;
        }
        Ok(equal)
    }

    /// The tolerance; `None` if all bits count.
    fn tolerance(&self) -> Result<Option<Tolerance>, TrainError> {
        for (key, value) in [("--rtol", self.rtol), ("--atol", self.atol)] {
            if let Some(value) = value.filter(|value| !value.is_finite() || *value < 0.0) {
                let value = value.to_string();
                let rule = "0 or more".into();
                return Err(TrainError::Invalid { key, value, rule });
            }
        }
        let is_exact = self.exact || (self.rtol.is_none() && self.atol.is_none());
        Ok((!is_exact).then(|| Tolerance {
            rtol: self.rtol.unwrap_or(0.0),
            atol: self.atol.unwrap_or(0.0),
        }))
    }

    /// The tensors to compare.
    fn selections<'a>(
        &self,
        a: &'a Checkpoint,
        b: &'a Checkpoint,
    ) -> Result<[Selection<'a>; 2], TrainError> {
        let all = TensorPattern::all();
        let pattern = self.tensors.as_ref().unwrap_or(&all);
        let select = |checkpoint| Selection::new(checkpoint, |name| pattern.matches(name));
        let found = [select(a), select(b)];
        if self.tensors.is_some() && found.iter().all(|found| found.headers().is_empty()) {
            // This returns the error, which names a tensor that exists.
            pattern.select(a)?;
            pattern.select(b)?;
        }
        Ok(found)
    }
}

fn title(checkpoint: &Checkpoint) -> String {
    let manifest = checkpoint.manifest();
    let run = match &manifest.run_id {
        Some(run) => format!("run {run}"),
        None => "no run".into(),
    };
    let path = checkpoint.path().display();
    format!("{path}: step {}, {}, {run}", manifest.step, manifest.layout)
}

/// A key whose values differ; `None` is that of a checkpoint without the key.
struct Change {
    key: String,
    a: Option<Value>,
    b: Option<Value>,
}

impl Change {
    fn line(&self) -> String {
        let [a, b] = [&self.a, &self.b].map(|value| match value {
            Some(value) => shortened(&value.to_string(), LONGEST),
            None => "absent".into(),
        });
        format!("{}: {a} and {b}", self.key)
    }

    fn json(&self) -> Value {
        let Self { key, a, b } = self;
        json!({"kind": "key", "key": key, "a": a, "b": b})
    }
}

/// The differences of step, model configuration and trainer's state.
fn changes(a: &Checkpoint, b: &Checkpoint) -> Vec<Change> {
    let keys = |checkpoint: &Checkpoint| {
        let mut keys = BTreeMap::from([("step".to_string(), json!(checkpoint.step()))]);
        keys.extend(by_key("model", checkpoint.model()));
        keys.extend(by_key("trainer", checkpoint.trainer()));
        keys
    };
    let [a, b] = [keys(a), keys(b)];
    let extra = b.keys().filter(|key| !a.contains_key(*key));
    let all = a.keys().chain(extra);
    let change = |key: &String| {
        let [a, b] = [&a, &b].map(|keys| keys.get(key).cloned());
        (a != b).then(|| Change {
            key: key.clone(),
            a,
            b,
        })
    };
    all.filter_map(change).collect()
}

/// Whether a tensor is equal in both; with a tolerance, whether all values are close.
fn is_equal(tensor: &TensorComparison, has_tolerance: bool) -> bool {
    let values = tensor.values.as_ref();
    values.is_some_and(|values| match has_tolerance {
        true => values.num_beyond == 0,
        false => values.bitwise_equal,
    })
}

/// How a tensor differs.
fn difference(tensor: &TensorComparison) -> String {
    let shown = |header: &TensorHeader| format!("{} {:?}", header.dtype.name(), header.shape);
    let (a, b) = match (&tensor.a, &tensor.b) {
        (Some(a), Some(b)) => (a, b),
        (Some(a), None) => return format!("only in a: {}", shown(a)),
        (None, Some(b)) => return format!("only in b: {}", shown(b)),
        (None, None) => return "in neither".into(),
    };
    let mut parts = Vec::new();
    if a.dtype != b.dtype || a.shape != b.shape {
        parts.push(format!("{} and {}", shown(a), shown(b)));
    }
    if let Some(values) = &tensor.values {
        let count = values.num_different;
        let elements = a.shape.iter().product::<usize>();
        match (&values.first, &values.at) {
            (Some(first), Some(at)) => parts.push(format!(
                "{count} of {elements} values differ, first at {first:?}, by at most {:.3e} at {at:?}; \
                relative norm {:.3e}",
                values.max_abs, values.relative_norm
            )),
            _ if a.dtype == b.dtype => {
                parts.push("all values are equal, but not all bits (zeros or NaNs)".into());
            }
            _ => parts.push("all values are equal".into()),
        }
    }
    parts.join("; ")
}

fn tensor_json(tensor: &TensorComparison) -> Value {
    let header = |header: &Option<TensorHeader>| {
        let json =
            |header: &TensorHeader| json!({"dtype": header.dtype.name(), "shape": header.shape});
        header.as_ref().map(json)
    };
    let values = tensor.values.as_ref();
    json!({
        "kind": "tensor",
        "name": tensor.name,
        "a": header(&tensor.a),
        "b": header(&tensor.b),
        "different": values.map(|values| values.num_different),
        "beyond": values.map(|values| values.num_beyond),
        "max_abs": values.map(|values| values.max_abs),
        "at": values.and_then(|values| values.at.clone()),
        "first": values.and_then(|values| values.first.clone()),
        "relative_norm": values.map(|values| values.relative_norm),
    })
}
