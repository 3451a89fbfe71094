//! The tensors of a model of Megatron-Core, each with the parameter of megaburn that it is.

use std::collections::BTreeSet;

use burn::tensor::DType;
use megaburn_models::DecoderConfig;
use megaburn_torch::{DType as TorchDType, dcp::DcpTensor, megatron::MegatronDir};

use super::{
    error::MegatronError,
    names::{Place, Region},
};

/// A parameter of the model, and the box of Megatron-Core's tensor that has its weights.
#[derive(Clone, Debug)]
pub(super) struct Parameter {
    /// Its path in megaburn.
    pub(super) path: String,
    /// Its shape in megaburn.
    pub(super) shape: Vec<usize>,
    /// Where it is in a model of Megatron-Core.
    pub(super) place: Place,
    /// The name of the tensor.
    pub(super) theirs: String,
    pub(super) region: Region,
    /// The type of the tensor.
    pub(super) dtype: DType,
}

impl Parameter {
    /// The shape of the box without the dims that count layers and experts.
    pub(super) fn inner(&self) -> &[usize] {
        &self.region.sizes[self.region.sizes.len() - self.shape.len()..]
    }
}

/// The parameters of `model`. `padded_vocab` is the number of rows of the vocabulary, padding
/// included.
///
/// # Errors
/// A tensor is missing, has another shape or no floats; or the checkpoint has a tensor that no
/// parameter of the model is.
pub(super) fn parameters(
    dir: &MegatronDir,
    model: &DecoderConfig,
    padded_vocab: usize,
) -> Result<Vec<Parameter>, MegatronError> {
    let mut known = BTreeSet::new();
    let mut found = Vec::new();
    let plan = model.whole_plan().map_err(|error| MegatronError::Missing {
        path: dir.dcp().path().into(),
        what: "model that can be split".into(),
        why: error.to_string(),
    })?;
    for (path, spec) in plan.iter() {
        let shape = spec.shard.global_shape.to_vec();
        let (place, theirs, is_stacked) = find(dir, path)?;
        let region = place.region(&shape, model, padded_vocab, is_stacked);
        let dtype = checked(dir, &theirs, dir.dcp().tensor(&theirs)?, &region)?;
        known.insert(theirs.clone());
        found.push(Parameter {
            path: path.to_string(),
            shape,
            place,
            theirs,
            region,
            dtype,
        });
    }
    match dir.model().find(|(name, _)| !known.contains(*name)) {
        None => Ok(found),
        Some((name, tensor)) => {
            let (shape, family) = (tensor.shape(), model.family);
            let why = format!("has the shape {shape:?}, but a {family} has no such tensor");
            Err(wrong(dir, name, why))
        }
    }
}

/// Where the parameter at `path` is, the name of its tensor, and whether that stacks the layers.
fn find(dir: &MegatronDir, path: &str) -> Result<(Place, String, bool), MegatronError> {
    let has = |name: &str| dir.dcp().tensor(name).is_ok();
    let place = Place::of(path).ok_or_else(|| wrong(dir, path, "is not converted".into()))?;
    let other = place.in_transformer_engine();
    for place in [Some(place.clone()), other].into_iter().flatten() {
        for is_stacked in [true, false] {
            let name = place.tensor(is_stacked);
            if has(&name) {
                return Ok((place, name, is_stacked));
            }
        }
    }
    let why = format!("is missing; megaburn needs it for `{path}`");
    Err(wrong(dir, &place.tensor(true), why))
}

/// The type of a tensor, if it has the shape of `region` and floats.
pub(super) fn checked(
    dir: &MegatronDir,
    name: &str,
    tensor: &DcpTensor,
    region: &Region,
) -> Result<DType, MegatronError> {
    if tensor.shape() != region.shape {
        let (found, expected) = (tensor.shape(), &region.shape);
        let why = format!("has the shape {found:?}, but the arguments say {expected:?}");
        return Err(wrong(dir, name, why));
    }
    match tensor.dtype() {
        TorchDType::F32 => Ok(DType::F32),
        TorchDType::BF16 => Ok(DType::BF16),
        TorchDType::F16 => Ok(DType::F16),
        other => Err(wrong(
            dir,
            name,
            format!("is {other}, not f32, bf16 or f16"),
        )),
    }
}

pub(super) fn wrong(dir: &MegatronDir, name: &str, why: String) -> MegatronError {
    MegatronError::Tensor {
        path: dir.dcp().path().into(),
        name: name.into(),
        why,
    }
}
