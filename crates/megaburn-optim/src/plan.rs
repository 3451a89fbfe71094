use std::collections::BTreeSet;

use burn::{
    Tensor,
    module::{Module, Param},
};
use megaburn_mesh::ShardPlan;

use crate::{
    error::OptimError,
    visit::{FloatVisitor, visit_floats},
};

/// Checks that the float parameters of a module are those of the plan. Call it once, after building
/// the module.
///
/// # Errors
/// The first parameter that only one of them has, or whose local shape differs.
pub(crate) fn check_plan<M: Module>(module: &M, plan: &ShardPlan) -> Result<(), OptimError> {
    let mut check = Check {
        plan,
        seen: BTreeSet::new(),
        error: None,
    };
    visit_floats(module, &mut check);
    if let Some(error) = check.error {
        return Err(error);
    }
    match plan.iter().find(|(path, _)| !check.seen.contains(*path)) {
        Some((path, _)) => Err(OptimError::NotInModule {
            path: path.to_string(),
        }),
        None => Ok(()),
    }
}

struct Check<'a> {
    plan: &'a ShardPlan,
    seen: BTreeSet<String>,
    error: Option<OptimError>,
}

impl FloatVisitor for Check<'_> {
    fn visit<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        let found = param.lazy_shape().to_vec();
        let error = match self.plan.get(&path).map(|spec| spec.shard.local_shape()) {
            None => Some(OptimError::NotInPlan {
                path: path.clone(),
                shape: found,
            }),
            Some(expected) if expected != found => Some(OptimError::LocalShape {
                path: path.clone(),
                found,
                expected,
            }),
            Some(_) => None,
        };
        self.error = self.error.take().or(error);
        self.seen.insert(path);
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use rstest::rstest;

    use super::*;
    use crate::testing::{Net, plan_of};

    #[test]
    fn a_module_and_its_plan_agree() {
        let device = Device::default().autodiff();
        for ranks in [1, 2] {
            check_plan(&Net::new(5, 6, 0, ranks, &device), &plan_of(5, 6, 0, ranks)).unwrap();
        }
    }

    #[rstest]
    #[case("bias", "[6]")]
    #[case("matrix", "[5, 6]")]
    fn a_parameter_outside_the_plan_is_an_error_naming_it(
        #[case] dropped: &str,
        #[case] shape: &str,
    ) {
        let mut plan = ShardPlan::new();
        for (path, spec) in plan_of(5, 6, 0, 1)
            .iter()
            .filter(|(path, _)| *path != dropped)
        {
            plan.insert(path, spec.clone()).unwrap();
        }
        let net = Net::new(5, 6, 0, 1, &Device::default().autodiff());
        let error = check_plan(&net, &plan).unwrap_err().to_string();
        let message = format!(
            "parameter `{dropped}` of shape {shape} is in the module but not in the shard plan"
        );
        assert!(error.contains(&message), "{error}");
    }

    #[test]
    fn a_plan_of_another_module_is_an_error() {
        let net = Net::new(5, 6, 0, 1, &Device::default().autodiff());
        let error = check_plan(&net, &plan_of(5, 8, 0, 1))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`matrix` has shape [5, 6], but the shard plan has [5, 8]"),
            "{error}"
        );
        let mut plan = plan_of(5, 6, 0, 1);
        plan.insert("ghost", plan.get("bias").unwrap().clone())
            .unwrap();
        let error = check_plan(&net, &plan).unwrap_err().to_string();
        assert!(
            error.contains("`ghost` is in the shard plan but not in the module"),
            "{error}"
        );
    }
}
