use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::{GradientsParams, LBFGS, LearningRate},
    tensor::Tensor,
};
use megaburn_collective::{CollectiveError, Group, GroupShards, region::unwrap_collective};
use megaburn_mesh::ShardPlan;

use crate::error::OptimError;

/// One step of Burn's L-BFGS on a module whose parameters are shards, with the result of one rank
/// that holds the full module. `closure` returns the loss and the gradients of a module, as in
/// Burn's `LBFGS::step`; it is called equally often on every rank, which sees the same loss.
///
/// L-BFGS multiplies vectors of all parameters, and keeps a history of such vectors. Every rank
/// gathers the full parameters and gradients, and has the full history.
///
/// # Errors
/// `group` is not the group that splits the module; see [`megaburn_collective::ShardsError`].
///
/// # Panics
/// If a collective fails.
/// # Collective
/// All members of `group`: an all-gather of each split parameter, and of its gradient at each
/// evaluation.
pub fn lbfgs_step<M: Module>(
    optimizer: &mut LBFGS,
    lr: LearningRate,
    module: M,
    (plan, group): (&ShardPlan, &Group),
    mut closure: impl FnMut(M) -> (f64, GradientsParams),
) -> Result<(M, f64), OptimError> {
    let shards = GroupShards::new(plan, group).map_err(|error| OptimError::Shards {
        why: error.to_string(),
    })?;
    let full = full_values(&module, &shards, None)?;
    let params = FullParams {
        flat: Param::from_tensor(Tensor::from_inner(full)),
    };
    let evaluate = |params: FullParams| {
        let id = params.flat.id;
        let (loss, grads) = closure(with_values(module.clone(), &shards, params.flat.val()));
        let full = unwrap_collective(full_values(&module, &shards, Some(&grads)));
        let mut grads = GradientsParams::new();
        grads.register::<1>(id, full);
        (loss, grads)
    };
    let (params, loss) = optimizer.step(lr, params, evaluate);
    let module = with_values(module, &shards, params.flat.val());
    Ok((module, loss))
}

/// All parameters of the full module, one after the other.
#[derive(Module, Debug)]
struct FullParams {
    flat: Param<Tensor<1>>,
}

/// The full parameters or, if there are any, their gradients.
fn full_values<M: Module>(
    module: &M,
    shards: &GroupShards,
    grads: Option<&GradientsParams>,
) -> Result<Tensor<1>, CollectiveError> {
    let mut gatherer = Gatherer {
        path: Vec::new(),
        shards,
        grads,
        parts: Vec::new(),
        error: None,
    };
    module.visit(&mut gatherer);
    match gatherer.error {
        Some(error) => Err(error),
        None => Ok(Tensor::cat(gatherer.parts, 0)),
    }
}

struct Gatherer<'a> {
    path: Vec<String>,
    shards: &'a GroupShards,
    grads: Option<&'a GradientsParams>,
    parts: Vec<Tensor<1>>,
    error: Option<CollectiveError>,
}

impl Gatherer<'_> {
    /// The value or the gradient of a parameter, which is zero if it got none.
    fn local<const D: usize>(&self, id: ParamId, value: Tensor<D>) -> Tensor<D> {
        match self.grads {
            None => value,
            Some(grads) => grads.get(id).unwrap_or_else(|| value.zeros_like()),
        }
    }
}

impl ModuleVisitor for Gatherer<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.error.is_some() {
            return;
        }
        let local = self.local(param.id, param.val().inner());
        let full = match self.shards.get(&self.path.join(".")) {
            Some(shards) => shards.gather(local),
            None => Ok(local),
        };
        match full {
            Ok(full) => self.parts.push(full.flatten(0, D - 1)),
            Err(error) => self.error = Some(error),
        }
    }
}

/// The module with this rank's parts of the full parameters.
fn with_values<M: Module>(module: M, shards: &GroupShards, full: Tensor<1>) -> M {
    module.map(&mut Scatterer {
        path: Vec::new(),
        shards,
        full: full.inner(),
        start: 0,
    })
}

struct Scatterer<'a> {
    path: Vec<String>,
    shards: &'a GroupShards,
    full: Tensor<1>,
    start: usize,
}

impl ModuleMapper for Scatterer<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shards = self.shards.get(&self.path.join("."));
        param.map(|old| {
            let shape: [usize; D] = match shards {
                Some(shards) => std::array::from_fn(|dim| shards.own().global_shape[dim]),
                None => old.dims(),
            };
            let len = shape.iter().product();
            let full = self.full.clone().narrow(0, self.start, len).reshape(shape);
            self.start += len;
            let new = match shards {
                Some(shards) => shards.part(full),
                None => full,
            };
            let is_trained = old.is_require_grad();
            // The parameter is on the autodiff device if it was there.
            let new = if old.is_autodiff() {
                Tensor::from_inner(new)
            } else {
                new
            };
            new.set_require_grad(is_trained)
        })
    }
}
