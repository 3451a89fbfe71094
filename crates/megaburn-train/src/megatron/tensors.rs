//! The tensors of a checkpoint of Megatron-Core that a run needs.

use std::collections::{BTreeSet, HashMap};

use burn::tensor::{DType, TensorData};
use megaburn_models::DecoderConfig;
use megaburn_torch::{
    DType as TorchDType,
    dcp::DcpTensor,
    megatron::{MegatronDir, OptimizerForm},
};

use super::{
    args::Args,
    error::MegatronError,
    model_settings::has_experts,
    names::{Form, Place, Region},
    values::in_our_order,
};

/// A tensor of the run, and the box of Megatron-Core's tensor that has its values.
#[derive(Debug)]
pub(super) struct Tensor {
    /// Its name in a checkpoint of megaburn.
    pub(super) name: String,
    /// Its shape in megaburn.
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    theirs: String,
    form: Form,
    region: Region,
}

/// The moments of AdamW, which have the same names in both programs.
pub(super) const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];
/// The names of f32 weights in the state of an optimizer, distributed or not.
pub(super) const MASTERS: [&str; 2] = ["param", "fp32_param"];

/// All tensors of a run of `model`: weights in f32 where the checkpoint has them, and moments.
/// `padded_vocab` is the number of rows of the vocabulary, padding included.
///
/// # Errors
/// A tensor is missing, has another shape or no floats; or the checkpoint has a tensor that no
/// parameter of the model is.
pub(super) fn tensors(
    dir: &MegatronDir,
    model: &DecoderConfig,
    padded_vocab: usize,
) -> Result<Vec<Tensor>, MegatronError> {
    let states = states(dir)?;
    let mut known = BTreeSet::new();
    let mut found = Vec::new();
    let plan = model.whole_plan().map_err(|error| MegatronError::Missing {
        path: dir.dcp().path().into(),
        what: "model that can be split".into(),
        why: error.to_string(),
    })?;
    for (path, spec) in plan.iter() {
        let shape = &spec.shard.global_shape;
        let (place, parameter, is_stacked) = find(dir, path)?;
        let region = place.region(shape, model, padded_vocab, is_stacked);
        checked(dir, &parameter, dir.dcp().tensor(&parameter)?, &region)?;
        known.insert(parameter.clone());
        let master = MASTERS
            .iter()
            .find_map(|state| states.get(&(*state, parameter.as_str())));
        let weights = master.map_or(parameter.as_str(), |name| name);
        let mut all = vec![("model", weights)];
        for state in MOMENTS {
            let name = states.get(&(state, parameter.as_str()));
            let why = format!("has no state {state} of the optimizer");
            all.push((state, name.ok_or_else(|| wrong(dir, &parameter, why))?));
        }
        for (prefix, theirs) in all {
            let tensor = dir.dcp().tensor(theirs)?;
            found.push(Tensor {
                name: format!("{prefix}.{path}"),
                shape: shape.clone(),
                dtype: checked(dir, theirs, tensor, &region)?,
                theirs: theirs.into(),
                form: place.form,
                region: region.clone(),
            });
        }
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

/// The arguments that are a dim of a tensor, or a factor of one.
const SIZES: [&str; 5] = [
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
];

/// Refuses sizes that the tensors of a checkpoint cannot have, before a model is made from them.
///
/// # Errors
/// An argument is larger than every dim of every tensor.
pub(super) fn check_sizes(dir: &MegatronDir, args: Args) -> Result<(), MegatronError> {
    let dims = dir.model().flat_map(|(_, tensor)| tensor.shape());
    let largest = dims.copied().max().unwrap_or(0).max(dir.model().count());
    let of_mlp = match has_experts(args)? {
        true if args.get("moe_ffn_hidden_size").is_some() => {
            &["num_experts", "moe_ffn_hidden_size"]
        }
        true => &["num_experts", "ffn_hidden_size"],
        false => &["ffn_hidden_size"][..],
    };
    for name in SIZES.iter().chain(of_mlp) {
        if args.optional_size(name)?.is_some_and(|size| size > largest) {
            let why =
                format!("no tensor of the checkpoint has more than {largest} rows or columns");
            return Err(args.refused(name, why));
        }
    }
    Ok(())
}

impl Tensor {
    /// Reads the values. No other tensor is in memory.
    ///
    /// # Errors
    /// A file is missing, damaged or cannot be read.
    pub(super) fn read(
        &self,
        dir: &MegatronDir,
        model: &DecoderConfig,
    ) -> Result<TensorData, MegatronError> {
        let Region { offsets, sizes, .. } = &self.region;
        let theirs = dir.dcp().read_region(&self.theirs, offsets, sizes)?;
        let ours = in_our_order(self.form, &self.shape, model, self.dtype.size(), &theirs);
        Ok(TensorData::from_bytes_vec(
            ours,
            self.shape.clone(),
            self.dtype,
        ))
    }
}

/// The names of the tensors of the optimizer, by state and parameter.
fn states(dir: &MegatronDir) -> Result<HashMap<(&str, &str), &str>, MegatronError> {
    if dir.optimizer_form() == OptimizerForm::None {
        return Err(MegatronError::Missing {
            path: dir.dcp().path().into(),
            what: "state of the optimizer".into(),
            why: "save it without --no-save-optim".into(),
        });
    }
    let tensors = dir.optimizer()?.into_iter();
    Ok(tensors
        .map(|tensor| ((tensor.state, tensor.parameter), tensor.name))
        .collect())
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
fn checked(
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

fn wrong(dir: &MegatronDir, name: &str, why: String) -> MegatronError {
    MegatronError::Tensor {
        path: dir.dcp().path().into(),
        name: name.into(),
        why,
    }
}
