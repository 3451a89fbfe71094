use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{Int, Tensor},
};
use megaburn_collective::{CollectiveError, Group, Lane, tensors};

/// The module with rank 0's parameters. Ranks that build a module each draw different weights from
/// Burn's generator.
///
/// # Errors
/// See [`CollectiveError`].
/// # Collective
/// All members of `group`: a broadcast of each parameter.
pub(super) fn from_first<M: Module>(module: M, group: &Group) -> Result<M, CollectiveError> {
    if group.size() == 1 {
        return Ok(module);
    }
    let mut mapper = FromFirst { group, error: None };
    let module = module.map(&mut mapper);
    mapper.error.map_or(Ok(module), Err)
}

struct FromFirst<'a> {
    group: &'a Group,
    error: Option<CollectiveError>,
}

impl ModuleMapper for FromFirst<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        param.map(|value| {
            let is_trained = value.is_require_grad();
            let is_autodiff = value.is_autodiff();
            let own = if is_autodiff {
                value.clone().inner()
            } else {
                value.clone()
            };
            match tensors::broadcast(own, 0, self.group, Lane::InOrder) {
                Ok(work) if is_autodiff => {
                    Tensor::from_inner(work.wait()).set_require_grad(is_trained)
                }
                Ok(work) => work.wait(),
                Err(error) => {
                    self.error = Some(error);
                    value
                }
            }
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        if self.error.is_some() {
            return param;
        }
        param.map(
            |value| match tensors::broadcast(value.clone(), 0, self.group, Lane::InOrder) {
                Ok(work) => work.wait(),
                Err(error) => {
                    self.error = Some(error);
                    value
                }
            },
        )
    }
}
