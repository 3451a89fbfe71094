//! A module's parameters by path.

use std::fmt;

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param},
    tensor::{DType, Tensor, TensorData},
};

/// A parameter whose values stay on the device until they are read.
pub struct LazyParam {
    /// The path in the module.
    pub path: String,
    /// Element type.
    pub dtype: DType,
    shape: Vec<usize>,
    flat: Box<dyn FnOnce() -> Tensor<1> + Send>,
}

impl LazyParam {
    /// Reads the local values to the host.
    ///
    /// # Errors
    /// The device cannot be read.
    pub fn read(self) -> Result<TensorData, String> {
        let shape = self.shape.clone();
        let dtype = self.dtype;
        let data = self.flat().try_into_data();
        let data = data.map_err(|error| error.to_string())?;
        Ok(TensorData::from_bytes(data.into_bytes(), shape, dtype))
    }

    /// The local values on their device, without autodiff.
    ///
    /// # Shapes
    /// `[local elements]`, row-major.
    pub fn flat(self) -> Tensor<1> {
        (self.flat)()
    }
}

impl fmt::Debug for LazyParam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?}", self.path, self.dtype)
    }
}

/// Lists all float parameters with their paths, in the module's order.
pub fn lazy_params<M: Module>(module: &M) -> Vec<LazyParam> {
    let mut reader = Reader::default();
    module.visit(&mut reader);
    reader.params
}

/// Reads the local values of all float parameters with their paths, in the module's order.
///
/// # Panics
/// If the device cannot be read.
#[expect(
    clippy::panic,
    reason = "documented: a device that cannot be read is lost"
)]
pub fn read_params<M: Module>(module: &M) -> Vec<(String, TensorData)> {
    let read = |param: LazyParam| {
        let path = param.path.clone();
        let data = param
            .read()
            .unwrap_or_else(|error| panic!("cannot read `{path}`: {error}"));
        (path, data)
    };
    lazy_params(module).into_iter().map(read).collect()
}

/// Replaces every float parameter's local value by `value(path, local shape)`. Each parameter takes
/// the element type of that data.
///
/// # Errors
/// The first error of `value`; the module is lost then.
///
/// # Panics
/// If `value` returns data of another shape.
pub fn load_params<M: Module, E>(
    module: M,
    value: impl FnMut(&str, &[usize]) -> Result<TensorData, E>,
) -> Result<M, E> {
    let mut writer = Writer {
        path: Vec::new(),
        value,
        error: None,
    };
    let module = module.map(&mut writer);
    match writer.error {
        Some(error) => Err(error),
        None => Ok(module),
    }
}

#[derive(Default)]
struct Reader {
    path: Vec<String>,
    params: Vec<LazyParam>,
}

impl ModuleVisitor for Reader {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val().inner();
        self.params.push(LazyParam {
            path: self.path.join("."),
            dtype: value.dtype(),
            shape: value.dims().to_vec(),
            flat: Box::new(move || value.flatten(0, D - 1)),
        });
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
        // An uninitialized parameter is replaced without being drawn.
        let path = self.path.join(".");
        let shape = param.lazy_shape();
        match (self.value)(&path, &shape) {
            Ok(data) => {
                assert_eq!(
                    data.shape(),
                    &shape,
                    "the new value of `{path}` has another shape"
                );
                let id = param.id;
                let dtype = data.dtype();
                let value = Tensor::from_data(data, (&param.lazy_device(), dtype));
                param.transform_for_load(value, id)
            }
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}
