//! Checks that weights are finite before they are saved.

use burn::{
    Tensor,
    module::{Module, Param},
    tensor::DType,
};

use crate::{
    error::OptimError,
    leaf::flat,
    masters::is_remainder,
    offload::{HostSlot, Key},
    optimizer::Optimizer,
    visit::{FloatVisitor, visit_floats},
};

/// Elements checked per chunk, which bounds the memory of the check's temporaries.
const TOGETHER: usize = 1 << 24;

impl Optimizer {
    /// The paths of the parameters of `module` whose values are not all finite, in the part that
    /// this rank keeps. Masters are checked where a parameter has one. An update from finite
    /// gradients can still overflow.
    ///
    /// The values are checked on their device; only one number per parameter is copied to the host.
    ///
    /// # Errors
    /// The device cannot be read.
    pub fn find_non_finite<M: Module>(&self, module: &M) -> Result<Vec<String>, OptimError> {
        let mut found = NonFiniteFinder {
            optimizer: self,
            paths: Vec::new(),
            poisons: Vec::new(),
        };
        visit_floats(module, &mut found);
        let NonFiniteFinder { paths, poisons, .. } = found;
        if poisons.is_empty() {
            return Ok(Vec::new());
        }
        let poisons = Tensor::cat(poisons, 0).try_into_data();
        let poisons = poisons.map_err(|error| OptimError::Device {
            why: error.to_string(),
        })?;
        let poisons: Vec<f32> = poisons.try_to_vec().expect("the tensor is f32");
        let bad = paths
            .into_iter()
            .zip(poisons)
            .filter(|(_, poison)| poison.is_nan());
        Ok(bad.map(|(path, _)| path).collect())
    }
}

/// Collects one number per parameter: zero, or NaN if any of its values is not finite.
struct NonFiniteFinder<'a> {
    optimizer: &'a Optimizer,
    paths: Vec<String>,
    poisons: Vec<Tensor<1>>,
}

impl FloatVisitor for NonFiniteFinder<'_> {
    fn visit<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        let Optimizer {
            state, sharding, ..
        } = self.optimizer;
        let master = state.get(&Key::master(&path));
        // A parameter is its master rounded, so it is checked in place of a remainder.
        let master = master.filter(|master| !is_remainder(master));
        let master = master.map(HostSlot::tensor);
        let values = match master.or_else(|| sharding.part(&path)) {
            Some(values) => values,
            // A sharded parameter may have no values on this rank.
            None if sharding.is_param_sharded(&path) => return,
            None => flat(param.val()),
        };
        let poison = |start: usize| {
            let len = TOGETHER.min(values.dims()[0] - start);
            values
                .clone()
                .narrow(0, start, len)
                .cast(DType::F32)
                .mul_scalar(0.0)
                .sum()
        };
        let sum = (0..values.dims()[0])
            .step_by(TOGETHER)
            .map(poison)
            .reduce(Tensor::add);
        if let Some(sum) = sum {
            self.paths.push(path);
            self.poisons.push(sum);
        }
    }
}
