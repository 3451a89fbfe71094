//! The values of a module's parameters by path.

use burn::{
    module::{Module, ModuleMapper, Param, ParamId},
    tensor::{Tensor, TensorData},
};

use crate::error::LearnerError;

/// One float parameter of a module.
pub(crate) struct Value<'a> {
    pub(crate) path: &'a str,
    pub(crate) id: ParamId,
    /// Whether it is trained. Frozen parameters and buffers are not.
    pub(crate) is_trained: bool,
    /// Returns the local values.
    pub(crate) read: &'a dyn Fn() -> TensorData,
}

/// Calls `f` for each float parameter of `module`, in the module's order, and replaces its values by
/// those that `f` returns. Ends with the first error.
pub(crate) fn map_values<M: Module>(
    module: M,
    f: impl FnMut(Value<'_>) -> Result<Option<TensorData>, LearnerError>,
) -> Result<M, LearnerError> {
    let mut mapper = Values {
        path: Vec::new(),
        f,
        error: None,
    };
    let module = module.map(&mut mapper);
    match mapper.error {
        Some(error) => Err(error),
        None => Ok(module),
    }
}

struct Values<F> {
    path: Vec<String>,
    f: F,
    error: Option<LearnerError>,
}

impl<F> ModuleMapper for Values<F>
where
    F: FnMut(Value<'_>) -> Result<Option<TensorData>, LearnerError>,
{
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let tensor = param.val();
        let is_trained = tensor.is_require_grad();
        let value = Value {
            path: &self.path.join("."),
            id: param.id,
            is_trained,
            read: &|| tensor.clone().into_data(),
        };
        match (self.f)(value) {
            Ok(None) => param,
            Ok(Some(data)) => {
                let new = Tensor::from_data(data, (&tensor.device(), tensor.dtype()));
                drop(tensor);
                param.map(|_| new.set_require_grad(is_trained))
            }
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}
