//! A module's parameters by path.

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{Tensor, TensorData},
};

/// The local values of all float parameters with their paths, in the module's order.
pub fn read_params<M: Module>(module: &M) -> Vec<(String, TensorData)> {
    let mut reader = Reader::default();
    module.visit(&mut reader);
    reader.params
}

/// The module with every float parameter's local value replaced by `value(path, local shape)`.
///
/// # Errors
/// The first error of `value`; the module is lost with it.
///
/// # Panics
/// If `value` gives data of another shape.
pub fn load_params<M: Module, E>(
    module: M,
    value: impl FnMut(&str, &[usize]) -> Result<TensorData, E>,
) -> Result<M, E> {
    let mut writer = Writer { path: Vec::new(), value, error: None };
    let module = module.map(&mut writer);
    match writer.error {
        Some(error) => Err(error),
        None => Ok(module),
    }
}

#[derive(Default)]
struct Reader {
    path: Vec<String>,
    params: Vec<(String, TensorData)>,
}

impl ModuleVisitor for Reader {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.params.push((self.path.join("."), param.val().inner().into_data()));
    }
}

struct Writer<F, E> {
    path: Vec<String>,
    value: F,
    error: Option<E>,
}

impl<F, E> ModuleMapper for Writer<F, E>
where
    F: FnMut(&str, &[usize]) -> Result<TensorData, E>,
{
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let (path, shape) = (self.path.join("."), param.dims());
        match (self.value)(&path, &shape) {
            Ok(data) => param.map(|old| {
                assert_eq!(data.shape().as_slice(), shape, "the new value of `{path}`");
                let new = Tensor::from_data(data, (&old.device(), old.dtype()));
                new.set_require_grad(old.is_require_grad())
            }),
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}
