use std::{
    cell::RefCell,
    collections::{HashMap, hash_map::Entry},
};

use cudarc::{
    cublaslt::{result as lt, sys as lts},
    driver::sys as cu,
};

use super::{
    key::Key,
    options::Tuning,
    plan::{Factors, Operands, Place, Plan},
    suggestions::{self, WORKSPACE},
    tune,
    tuned::Tuned,
};
use crate::{error::CudaError, streams::Stream};

/// The maximum number of cached plans.
const MOST_PLANS: usize = 4096;

/// cuBLASLt on one device thread: its handle, the workspace of CubeCL's stream, and plans and
/// algorithms for the shapes used so far. It lives as long as the device thread, i.e. as the
/// process.
struct Library {
    handle: lts::cublasLtHandle_t,
    workspace: u64,
    /// Plans by product, alignment, and whether the algorithm may be tuned.
    plans: HashMap<(Key, [u32; 4], bool), Plan>,
    /// The fastest algorithms of tuned products.
    tuned: Tuned<lts::cublasLtMatmulAlgo_t>,
    /// cuBLASLt's suggestions for products that are not tuned, by their [rounded](Key::round)
    /// sizes.
    suggested: HashMap<(Key, [u32; 4]), lts::cublasLtMatmulAlgo_t>,
}

thread_local! {
    static LIBRARY: RefCell<Option<Library>> = const { RefCell::new(None) };
}

/// Enqueues the product on `stream`.
pub(super) fn run(
    key: &Key,
    stream: Stream,
    operands: Operands,
    factors: Factors,
    (tune, tuning): (bool, Tuning),
) -> Result<(), CudaError> {
    check_bounds(key, &operands)?;
    LIBRARY.with_borrow_mut(|library| {
        let library = match library {
            Some(library) => library,
            None => library.insert(Library::load()?),
        };
        let handle = library.handle;
        let place = Place {
            handle,
            workspace: library.workspace,
            stream,
        };
        let launch = |plan: &Plan, out: u64| plan.launch(place, factors, operands, out);
        let Operands {
            a, b, out, bias, ..
        } = operands;
        let bias = bias.map_or(0, |bias| bias.ptr);
        let aligned = [a.ptr, b.ptr, out.ptr, bias].map(alignment);
        if let Some(plan) = library.plans.get(&(*key, aligned, tune)) {
            return launch(plan, out.ptr);
        }
        if library.plans.len() >= MOST_PLANS {
            // Evict untimed plans: they belong to products whose sizes keep changing, e.g. with the
            // rows of experts or with distributed documents.
            library.plans.retain(|_, plan| plan.is_timed);
        }
        let mut plan = Plan::new(key)?;
        let can_run = |algorithm: &lts::cublasLtMatmulAlgo_t| {
            suggestions::can_run(handle, plan.desc, plan.layouts, algorithm)
        };
        let best = if !tune {
            library.suggestion(key, &plan, aligned, tuning)?
        } else if let Some(known) = library.tuned.near(key, aligned).filter(can_run) {
            known
        } else {
            let candidates = plan.candidates(handle, aligned, tuning)?;
            let found = tune::fastest(stream, &candidates, out.bytes, tuning, |algorithm, out| {
                plan.algorithm = algorithm;
                launch(&plan, out)
            });
            if let Some(found) = found {
                library.tuned.put(key, aligned, found);
                plan.is_timed = true;
            }
            found.unwrap_or(candidates[0])
        };
        plan.algorithm = best;
        launch(
            library.plans.entry((*key, aligned, tune)).or_insert(plan),
            out.ptr,
        )
    })
}

/// The largest power of two up to 256 that divides an address; algorithms may rely on it.
fn alignment(ptr: u64) -> u32 {
    1 << ptr.trailing_zeros().min(8)
}

/// Refuses matrices that exceed their buffers; cuBLASLt does not check this.
fn check_bounds(key: &Key, operands: &Operands) -> Result<(), CudaError> {
    let Operands { a, b, out, .. } = operands;
    for (view, buffer, size) in [
        (key.a, a, key.of_a.size()),
        (key.b, b, key.of_b.size()),
        (key.out, out, key.output.size()),
    ] {
        let [long, wide] = if view.transposed {
            [view.cols, view.rows]
        } else {
            [view.rows, view.cols]
        };
        let last = (view.batch - 1) * view.batch_stride + (long - 1) * view.ld + wide;
        if (last * size) as u64 > buffer.bytes {
            let bytes = buffer.bytes;
            return Err(CudaError::Refused(format!(
                "{view:?} reaches past its buffer of {bytes} bytes"
            )));
        }
    }
    Ok(())
}

impl Library {
    fn load() -> Result<Self, CudaError> {
        let mut workspace = 0;
        // SAFETY: the driver writes the new address through the pointer; the context is current.
        unsafe { cu::cuMemAlloc_v2(&mut workspace, WORKSPACE) }
            .result()
            .map_err(CudaError::driver(
                "cuMemAlloc of cuBLASLt's workspace of 64 MiB",
            ))?;
        let handle = lt::create_handle().map_err(CudaError::cublas("cublasLtCreate"))?;
        let (plans, tuned, suggested) = Default::default();
        Ok(Self {
            handle,
            workspace,
            plans,
            tuned,
            suggested,
        })
    }

    /// The algorithm of a product that is not tuned. Asking cuBLASLt takes longer than many a
    /// product, so products with about equal row counts share one answer; the rows of experts
    /// differ in each pass.
    fn suggestion(
        &mut self,
        key: &Key,
        plan: &Plan,
        aligned: [u32; 4],
        tuning: Tuning,
    ) -> Result<lts::cublasLtMatmulAlgo_t, CudaError> {
        let round = key.round();
        let handle = self.handle;
        let algorithm = match self.suggested.entry((round, aligned)) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                *new.insert(Plan::new(&round)?.candidates(handle, aligned, tuning)?[0])
            }
        };
        if round == *key || suggestions::can_run(handle, plan.desc, plan.layouts, &algorithm) {
            Ok(algorithm)
        } else {
            Ok(plan.candidates(handle, aligned, tuning)?[0])
        }
    }
}
