use std::collections::BTreeMap;

use megaburn_mesh::ShardSpec;
use megaburn_models::{ModelError, hf::HfParam};
use megaburn_train::TrainError;

use crate::reference::Reference;

/// How far a gradient is from the reference.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Difference {
    /// The tensor's name in Hugging Face's model.
    pub(crate) name: String,
    /// `|| g - g_ref || / max(|| g_ref ||, 5e-5 || all gradients ||)`
    pub(crate) relative: f64,
}

/// Gradients of one rank: path, local values, and which part of the full gradient they are.
type Local = Vec<(String, Vec<f32>, ShardSpec)>;

/// A gradient of this fraction of all gradients or less is compared by that size, not by its own. With
/// the tolerance of f32, 1e-3, this allows the rounding of f32, 6e-8 of all gradients. The gradient of
/// key biases without rotary positions is zero, so that it consists of rounding only.
const FLOOR: f64 = 5e-5;

/// Compares the gradients of the ranks with the reference, tensor by tensor. Also returns the names
/// of the tensors whose gradient is not in the reference.
///
/// # Errors
/// Ranks hold different copies of a gradient.
pub(crate) fn compare_gradients(
    reference: &Reference,
    ranks: impl Iterator<Item = Local>,
) -> Result<(Vec<Difference>, Vec<String>), TrainError> {
    let whole = gather(reference, ranks)?;
    let mut found = Vec::new();
    let mut skipped = Vec::new();
    let mut all = 0.0;
    for param in reference.source.params().filter(|param| !param.is_buffer) {
        let values = &whole[&param.path];
        for (part, expected) in param.parts.iter().zip(expected(reference, param)?) {
            let Some(expected) = expected else {
                skipped.push(format!("grad.{}", part.name));
                continue;
            };
            let [rows, columns] = sides(&param.shape);
            let [mut distance, mut norm] = [0.0f64; 2];
            for row in 0..rows {
                for (column, of_ours) in part.columns.iter().cloned().flatten().enumerate() {
                    let ours = f64::from(values[row * columns + of_ours]);
                    let at = if param.transposed {
                        column * rows + row
                    } else {
                        row * part.num_columns() + column
                    };
                    let theirs = f64::from(expected[at]);
                    distance += (ours - theirs).powi(2);
                    norm += theirs.powi(2);
                }
            }
            all += norm;
            found.push((part.name.clone(), distance.sqrt(), norm.sqrt()));
        }
    }
    let floor = FLOOR * all.sqrt();
    let relative = |(name, distance, norm): (String, f64, f64)| {
        // Two zeros do not differ, and NaN differs from everything.
        let relative = if distance == 0.0 {
            0.0
        } else {
            distance / norm.max(floor)
        };
        let relative = if relative.is_nan() {
            f64::INFINITY
        } else {
            relative
        };
        Difference { name, relative }
    };
    Ok((found.into_iter().map(relative).collect(), skipped))
}

/// The reference's gradient of each tensor of a parameter, if it is there.
fn expected(reference: &Reference, param: &HfParam) -> Result<Vec<Option<Vec<f32>>>, TrainError> {
    // The reference may be of a model with a head even if the checkpoint was saved without it.
    let prefix = reference
        .source
        .config()
        .family
        .definition()
        .optional_prefix();
    let read = |name: &String| match reference.gradient(name)? {
        None => reference.gradient(&format!("{prefix}{name}")),
        found => Ok(found),
    };
    param.names().iter().map(read).collect()
}

/// Rows and columns of a matrix. A vector is one row.
fn sides(shape: &[usize]) -> [usize; 2] {
    let columns = *shape
        .last()
        .expect("a parameter has at least one dimension");
    [shape.iter().product::<usize>() / columns, columns]
}

fn gather(
    reference: &Reference,
    ranks: impl Iterator<Item = Local>,
) -> Result<BTreeMap<String, Vec<f32>>, TrainError> {
    let mut found: BTreeMap<String, Vec<Option<f32>>> = BTreeMap::new();
    for (path, local, spec) in ranks.flatten() {
        let whole = found
            .entry(path.clone())
            .or_insert_with(|| vec![None; spec.num_global()]);
        let mut same = true;
        for piece in &spec.pieces {
            spec.for_each_run(piece, |from, to, len| {
                for (copy, value) in whole[to..to + len].iter_mut().zip(&local[from..from + len]) {
                    same &= copy.get_or_insert(*value).to_bits() == value.to_bits();
                }
            });
        }
        if !same {
            return Err(ModelError::Tensor {
                path: reference.source.path().to_path_buf(),
                name: path,
                why: "has copies whose gradients differ between ranks".into(),
            }
            .into());
        }
    }
    let whole = |values: Vec<Option<f32>>| {
        values
            .into_iter()
            .map(|value| value.expect("the shards tile the parameter"))
            .collect()
    };
    Ok(found
        .into_iter()
        .map(|(path, values)| (path, whole(values)))
        .collect())
}
