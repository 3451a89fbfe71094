use burn::tensor::{DType, TensorData};
use megaburn_torch::megatron::MegatronDir;

use super::{refused::FIX, values::Buckets};
use crate::megatron::{error::MegatronError, parameter::Parameter};

/// Compares the f32 weights at the place of each parameter with the weights of the model, all
/// copies and all values.
///
/// # Errors
/// The weights of a parameter are others. The error names it and the first value that differs.
pub(super) fn prove(
    dir: &MegatronDir,
    buckets: &Buckets,
    parameters: &[Parameter],
) -> Result<(), MegatronError> {
    for parameter in parameters {
        let region = &parameter.region;
        let weights = dir
            .dcp()
            .read_region(&parameter.theirs, &region.offsets, &region.sizes)?;
        let (split, copies) = buckets.copies(dir, parameter)?;
        for copy in copies {
            let masters = buckets.read_copy(dir, parameter, split, copy, "param")?;
            let rounded = rounded(masters, parameter.dtype);
            if rounded == weights {
                continue;
            }
            let item = parameter.dtype.size();
            let mut values = rounded.chunks_exact(item).zip(weights.chunks_exact(item));
            let at = values.position(|(master, weight)| master != weight);
            return Err(MegatronError::Tensor {
                path: dir.dcp().path().into(),
                name: parameter.theirs.clone(),
                why: format!(
                    "is not what the f32 weights of the optimizer say: value {} of {}, which is \
                    `{}` here, differs where the order of parameters places it (`{}`); {FIX}",
                    at.unwrap_or(0),
                    weights.len() / item,
                    parameter.path,
                    buckets.tensor(copy, "param"),
                ),
            });
        }
    }
    Ok(())
}

/// The bytes of f32 values, rounded to another type.
fn rounded(values: Vec<u8>, dtype: DType) -> Vec<u8> {
    if dtype == DType::F32 {
        return values;
    }
    let len = values.len() / DType::F32.size();
    let values = TensorData::from_bytes_vec(values, vec![len], DType::F32);
    values.convert_dtype(dtype).as_bytes().to_vec()
}
