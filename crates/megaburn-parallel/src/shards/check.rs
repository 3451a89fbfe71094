use std::collections::BTreeMap;

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::Tensor,
};
use megaburn_mesh::ShardPlan;

use super::in_files::value_shape;
use crate::error::ParallelError;

/// Refuses a plan that misses a parameter, names one that does not exist, or gives one another
/// local shape.
///
/// # Errors
/// The first such parameter.
pub fn check_plan<M: Module>(module: &M, plan: &ShardPlan) -> Result<(), ParallelError> {
    let refuse = |why: String| Err(ParallelError::Plan { why });
    let found = shapes(module);
    for (path, shape) in &found {
        match plan.get(path).map(|spec| spec.shard.local_shape()) {
            Some(planned) if planned == *shape => {}
            Some(planned) => {
                return refuse(format!(
                    "`{path}` is {shape:?} in the module, but {planned:?} in the plan"
                ));
            }
            None if path.contains(".lora.") => {
                return refuse(format!(
                    "`{path}` is a factor of Burn's `apply_lora`, which does not know shards; use \
                    `ShardedLora`"
                ));
            }
            None => return refuse(format!("parameter `{path}` is missing from it")),
        }
    }
    match plan.iter().find(|(path, _)| !found.contains_key(*path)) {
        Some((path, _)) => refuse(format!("the module has no parameter `{path}`")),
        None => Ok(()),
    }
}

/// Local shapes of all float parameters by path.
pub(super) fn shapes<M: Module>(module: &M) -> BTreeMap<String, Vec<usize>> {
    let mut visitor = Shapes::default();
    module.visit(&mut visitor);
    visitor.shapes
}

#[derive(Default)]
struct Shapes {
    path: Vec<String>,
    shapes: BTreeMap<String, Vec<usize>>,
}

impl ModuleVisitor for Shapes {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.shapes.insert(self.path.join("."), value_shape(param));
    }
}
