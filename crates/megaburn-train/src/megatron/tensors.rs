//! The tensors of a checkpoint of Megatron-Core that a run needs.

use std::{collections::HashMap, rc::Rc};

use burn::tensor::{DType, TensorData};
use megaburn_models::DecoderConfig;
use megaburn_torch::megatron::{MegatronDir, OptimizerForm};

use super::{
    args::Args,
    buckets::{Buckets, find},
    error::MegatronError,
    model_settings::has_experts,
    names::Region,
    parameter::{Parameter, checked, wrong},
    values::in_our_order,
};

/// A tensor of the run, and where its values are.
#[derive(Debug)]
pub(super) struct Tensor {
    /// Its name in a checkpoint of megaburn.
    pub(super) name: String,
    pub(super) dtype: DType,
    source: Source,
    parameter: Rc<Parameter>,
}

/// Where the values of a tensor are.
#[derive(Debug)]
enum Source {
    /// In the tensor of this name, in the box of the parameter.
    Tensor(String),
    /// In the buckets of the optimizer, as this state.
    Buckets(Rc<Buckets>, &'static str),
    /// Nowhere: they are zero.
    Zeros,
}

/// The moments of AdamW, which have the same names in both programs.
pub(super) const MOMENTS: [&str; 2] = ["exp_avg", "exp_avg_sq"];
/// The names of f32 weights in the state of an optimizer, distributed or not.
const MASTERS: [&str; 2] = ["param", "fp32_param"];

/// All tensors of a run of `model`: weights in f32 where the checkpoint has them, and moments.
///
/// If `weights_only`, weights are those of the model, and moments are zero.
///
/// # Errors
/// A tensor of the optimizer is missing, has another shape or no floats; or its buckets are not those
/// of the parameters.
pub(super) fn tensors(
    dir: &MegatronDir,
    args: Args,
    model: &DecoderConfig,
    parameters: Vec<Parameter>,
    weights_only: bool,
) -> Result<Vec<Tensor>, MegatronError> {
    let form = dir.optimizer_form();
    let states = match form {
        _ if weights_only => HashMap::new(),
        OptimizerForm::ByBucket => HashMap::new(),
        _ => states(dir)?,
    };
    let buckets = match form {
        OptimizerForm::ByBucket if !weights_only => {
            Some(Rc::new(find(dir, args, model, &parameters)?))
        }
        _ => None,
    };
    let mut found = Vec::new();
    for parameter in parameters.into_iter().map(Rc::new) {
        let mut add = |prefix: &str, dtype, source| {
            found.push(Tensor {
                name: format!("{prefix}.{}", parameter.path),
                dtype,
                source,
                parameter: Rc::clone(&parameter),
            });
        };
        if let Some(buckets) = &buckets {
            let moments = MOMENTS.map(|state| (state, state));
            for (prefix, state) in [("model", MASTERS[0])].into_iter().chain(moments) {
                let source = Source::Buckets(Rc::clone(buckets), state);
                add(prefix, DType::F32, source);
            }
            continue;
        }
        let theirs = &parameter.theirs;
        let of = |state: &str| {
            states
                .get(&(state, theirs.as_str()))
                .map(|name| name.to_string())
        };
        let weights = MASTERS.iter().find_map(|state| of(state));
        let weights = weights.unwrap_or_else(|| theirs.clone());
        let dtype_of = |name: &str| checked(dir, name, dir.dcp().tensor(name)?, &parameter.region);
        add("model", dtype_of(&weights)?, Source::Tensor(weights));
        for state in MOMENTS {
            if weights_only {
                add(state, DType::F32, Source::Zeros);
                continue;
            }
            let name = of(state).ok_or_else(|| {
                let why = format!("has no state {state} of the optimizer");
                wrong(dir, theirs, why)
            })?;
            add(state, dtype_of(&name)?, Source::Tensor(name));
        }
    }
    Ok(found)
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
    /// Its shape in megaburn.
    pub(super) fn shape(&self) -> &[usize] {
        &self.parameter.shape
    }

    /// Reads the values. No other tensor is in memory.
    ///
    /// # Errors
    /// A file is missing, damaged or cannot be read.
    pub(super) fn read(
        &self,
        dir: &MegatronDir,
        model: &DecoderConfig,
    ) -> Result<TensorData, MegatronError> {
        let parameter = &self.parameter;
        let Region { offsets, sizes, .. } = &parameter.region;
        let theirs = match &self.source {
            Source::Tensor(name) => dir.dcp().read_region(name, offsets, sizes)?,
            Source::Buckets(buckets, state) => buckets.read(dir, parameter, state)?,
            Source::Zeros => vec![0; sizes.iter().product::<usize>() * self.dtype.size()],
        };
        let (form, shape) = (parameter.place.form, &parameter.shape);
        let ours = in_our_order(form, shape, model, self.dtype.size(), &theirs);
        Ok(TensorData::from_bytes_vec(ours, shape.clone(), self.dtype))
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
