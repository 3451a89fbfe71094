use std::ptr;

use super::{
    api::Api,
    descriptor::Descriptor,
    graph::Graph,
    names::{Address, Attribute, Handle, Heuristic, Kind},
};
use crate::CudaError;

/// What plans are made for.
#[derive(Debug)]
pub(super) enum Target {
    /// The GPU of a handle.
    Gpu(Handle),
    /// A GPU that is described and need not be there.
    #[cfg(test)]
    Described(Descriptor),
}

impl Target {
    fn of_graph(&self, graph: Descriptor) -> Result<Descriptor, CudaError> {
        match self {
            Self::Gpu(handle) => graph.with(Attribute::GraphHandle, &[*handle]),
            #[cfg(test)]
            Self::Described(_) => Ok(graph),
        }
    }

    fn of_heuristics(&self, heuristics: Descriptor) -> Result<Descriptor, CudaError> {
        match self {
            // It asks the graph.
            Self::Gpu(_) => Ok(heuristics),
            #[cfg(test)]
            Self::Described(gpu) => heuristics.with(Attribute::HeuristicsDevice, &[gpu.raw()]),
        }
    }

    fn of_plan(&self, plan: Descriptor) -> Result<Descriptor, CudaError> {
        match self {
            Self::Gpu(handle) => plan.with(Attribute::PlanHandle, &[*handle]),
            #[cfg(test)]
            Self::Described(gpu) => plan.with(Attribute::PlanDevice, &[gpu.raw()]),
        }
    }
}

/// A graph with the engine that computes it, compiled.
#[derive(Debug)]
pub(super) struct Plan {
    plan: Descriptor,
    /// What the engine takes of device memory beside the tensors.
    pub(super) workspace: u64,
    /// What the plan was made from.
    _parts: (Descriptor, Descriptor, Graph),
}

impl Plan {
    /// The best of the engines that the library suggests, of those that can.
    ///
    /// # Errors
    /// None can: the last one's reason.
    pub(super) fn find(
        api: &'static Api,
        target: &Target,
        graph: Graph,
    ) -> Result<Self, CudaError> {
        let whole = target.of_graph(Descriptor::new(api, Kind::OperationGraph)?)?;
        let whole = whole
            .with(Attribute::GraphOperations, &graph.operations())?
            .finished()?;
        let heuristics = target.of_heuristics(Descriptor::new(api, Kind::EngineHeuristics)?)?;
        let heuristics = heuristics
            .with(Attribute::HeuristicsGraph, &[whole.raw()])?
            .with(Attribute::HeuristicsMode, &[Heuristic::A])?
            .finished()?;
        let mut last = CudaError::Refused("cuDNN has no engine for it".into());
        for engine in heuristics.parts(Attribute::HeuristicsResults, Kind::EngineConfig)? {
            let plan = target.of_plan(Descriptor::new(api, Kind::ExecutionPlan)?)?;
            let plan = plan.with(Attribute::PlanEngineConfig, &[engine.raw()]);
            match plan.and_then(Descriptor::finished) {
                Ok(plan) => {
                    let workspace = plan.number(Attribute::PlanWorkspaceSize)?;
                    let workspace = u64::try_from(workspace).unwrap_or(0);
                    return Ok(Self {
                        plan,
                        workspace,
                        _parts: (engine, whole, graph),
                    });
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Puts the computation on the handle's stream. Addresses by the tensors' ids, of the workspace
    /// last.
    ///
    /// # Safety
    /// All the plan's tensors are among `tensors`, each with as much memory as its layout spans, and the
    /// workspace is as large as the plan asks for, until the stream has passed.
    pub(super) unsafe fn enqueue(
        &self,
        api: &'static Api,
        handle: Handle,
        tensors: &[(i64, Address)],
        workspace: Address,
    ) -> Result<(), CudaError> {
        let (ids, addresses): (Vec<_>, Vec<_>) = tensors.iter().copied().unzip();
        let pack = Descriptor::new(api, Kind::VariantPack)?
            .with(Attribute::PackIds, &ids)?
            .with(Attribute::PackPointers, &addresses)?
            .with(Attribute::PackWorkspace, &[workspace])?
            .finished()?;
        // SAFETY: the caller's.
        let status = unsafe { (api.execute)(handle, self.plan.raw(), pack.raw()) };
        api.check("cudnnBackendExecute", status)
    }
}

/// A handle of the current context's GPU.
pub(super) fn handle(api: &'static Api) -> Result<Handle, CudaError> {
    let mut handle = Handle(ptr::null_mut());
    // SAFETY: the library writes the new handle through the pointer.
    let status = unsafe { (api.create)(&mut handle) };
    api.check("cudnnCreate", status)?;
    Ok(handle)
}
