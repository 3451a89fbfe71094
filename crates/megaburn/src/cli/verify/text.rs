//! The output of `megaburn verify`.

use megaburn_checkpoint::{TensorComparison, TensorHeader};
use megaburn_verify::Report;
use serde_json::{Value, json};

/// The result of one layout as a line of text.
pub(super) fn line(report: &Report) -> String {
    let Report {
        family, layout, ok, ..
    } = report;
    let verdict = if *ok { "ok    " } else { "FAILED" };
    if let Some(error) = &report.error {
        return format!("{verdict} {family} {layout}: {error}");
    }
    let number = |number: Option<f64>| number.map_or("-".into(), |number| format!("{number:.1e}"));
    let worst = report.grad_worst.as_deref().unwrap_or("-");
    let further = report
        .mtp_losses_max_abs
        .map(|off| format!(", MTP {off:.1e}"));
    let skipped = report.skipped.join(", ");
    let skipped = if skipped.is_empty() {
        skipped
    } else {
        format!("; without {skipped}")
    };
    format!(
        "{verdict} {family} {layout}: logits {}, loss {}, gradients {} ({worst}), training {}{}{skipped}",
        number(report.logits_max_abs),
        number(report.loss_abs),
        number(report.grad_rel_max),
        number(report.train_losses_max_abs),
        further.unwrap_or_default(),
    )
}

/// The difference of a tensor as text; `None` if there is no difference.
pub(super) fn difference(tensor: &TensorComparison) -> Option<String> {
    let shown = |header: &TensorHeader| format!("{:?} {:?}", header.dtype, header.shape);
    let what = match (&tensor.a, &tensor.b, &tensor.values) {
        (Some(a), None, _) => format!("only in the first: {}", shown(a)),
        (None, Some(b), _) => format!("only in the second: {}", shown(b)),
        (Some(a), Some(b), None) => format!("{} and {}", shown(a), shown(b)),
        (Some(a), Some(b), Some(values)) => {
            if values.bitwise_equal {
                return None;
            }
            let types = if a.dtype == b.dtype {
                String::new()
            } else {
                format!("{:?} and {:?}, ", a.dtype, b.dtype)
            };
            let at = values
                .at
                .as_ref()
                .map(|at| format!(" at {at:?}"))
                .unwrap_or_default();
            format!(
                "{types}{} values differ, by at most {:e}{at}",
                values.num_different, values.max_abs
            )
        }
        (None, None, _) => return None,
    };
    Some(format!("{}: {what}", tensor.name))
}

pub(super) fn tensor_json(tensor: &TensorComparison) -> Value {
    let header = |header: &Option<TensorHeader>| {
        let json =
            |header: &TensorHeader| json!({"dtype": header.dtype.name(), "shape": header.shape});
        header.as_ref().map(json)
    };
    let values = tensor.values.as_ref();
    json!({
        "name": tensor.name,
        "a": header(&tensor.a),
        "b": header(&tensor.b),
        "bitwise_equal": values.is_some_and(|values| values.bitwise_equal),
        "num_different": values.map(|values| values.num_different),
        "max_abs": values.map(|values| values.max_abs),
        "at": values.and_then(|values| values.at.clone()),
    })
}
