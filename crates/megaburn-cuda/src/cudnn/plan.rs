use std::ptr;

use super::{
    api::Api,
    descriptor::Descriptor,
    graph::Graph,
    names::{Address, Attribute, Handle, Heuristic, Kind},
};
use crate::error::CudaError;

/// The GPU that plans are made for.
#[derive(Debug)]
pub(super) enum Target {
    /// The GPU of a handle.
    Gpu(Handle),
    /// A GPU given by a description; it need not exist.
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
            // The heuristics get the GPU from the graph's handle.
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

/// A graph with its chosen engine, compiled.
#[derive(Debug)]
pub(super) struct Plan {
    plan: Descriptor,
    /// The device memory in bytes that the engine needs in addition to the tensors.
    pub(super) workspace: u64,
    /// The descriptors that the plan was built from, which must outlive it.
    _parts: (Descriptor, Descriptor, Graph),
}

impl Plan {
    /// Builds a plan with the first of the suggested engines that supports the graph.
    ///
    /// # Errors
    /// No engine supports it; the error is the last engine's.
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
        let mut last = CudaError::Refused("cuDNN has no engine that supports it".into());
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

    /// Enqueues the computation on the handle's stream. `tensors` are addresses by tensor id.
    ///
    /// # Safety
    /// `tensors` must contain all tensors of the plan, each with as much memory as its layout
    /// spans. The workspace must have the size that the plan asks for. All must stay valid until
    /// the stream has run the computation.
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
        // SAFETY: guaranteed by the caller.
        let status = unsafe { (api.execute)(handle, self.plan.raw(), pack.raw()) };
        api.check("cudnnBackendExecute", status)
    }
}

/// Creates a handle for the current context's GPU.
pub(super) fn handle(api: &'static Api) -> Result<Handle, CudaError> {
    let mut handle = Handle(ptr::null_mut());
    // SAFETY: the library writes the new handle through the pointer.
    let status = unsafe { (api.create)(&mut handle) };
    api.check("cudnnCreate", status)?;
    Ok(handle)
}
