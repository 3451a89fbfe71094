//! Sums of weight gradients outside of Burn's `Gradients`, with hooks. The matrix product that adds
//! to them is in `cubecl-kernels/src/gradient_accumulation_fusion.rs`.

use std::{
    cell::Cell,
    collections::HashSet,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;

use crate::into_primitive::IntoPrimitive;

/// The main gradient of a weight: an f32 sum to which each micro-batch's weight-gradient GEMM adds
/// directly, instead of going through Burn's `Gradients` (Megatron's `main_grad`, with
/// `gradient_accumulation_fusion`).
///
/// A layer holds one for its weight and passes it to the operation that reads it. Until an optimizer
/// [attaches](Self::attach) itself, it does nothing and the weight gets an ordinary gradient. The
/// weight itself may also be provided through it, by a [source](Self::with_source). Clones share
/// all state.
#[derive(Clone, Default)]
pub struct MainGrad(Arc<Mutex<MainGradState>>);

#[derive(Default)]
struct MainGradState {
    attached: bool,
    sum: Option<Tensor<2>>,
    room: Option<OutBuffer>,
    on_gradient: Option<Hook>,
    on_use: Option<Hook>,
    source: Option<Source>,
}

/// Where a gradient is accumulated: an existing sum, or a buffer for a new one if there is any.
#[derive(Debug)]
pub struct AccumTarget {
    /// The existing sum.
    pub sum: Option<Tensor<2>>,
    /// Memory for a new sum.
    pub room: Option<Tensor<2>>,
}

/// Which pass a weight is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinearPass {
    /// The layer's result.
    Forward,
    /// The gradient of the layer's input, or its result [recomputed](LinearPass::backward) for
    /// backward.
    Backward,
}

thread_local! {
    static IS_BACKWARD: Cell<bool> = const { Cell::new(false) };
}

impl LinearPass {
    /// Whether this thread is inside [`LinearPass::backward`].
    pub fn is_backward() -> bool {
        IS_BACKWARD.get()
    }

    /// Runs `compute` as part of a backward pass: weights that this thread reads within it are read
    /// with [`LinearPass::Backward`].
    pub fn backward<T>(compute: impl FnOnce() -> T) -> T {
        /// Restores the previous value, also if `compute` panics and the panic is caught.
        struct Before(bool);
        impl Drop for Before {
            fn drop(&mut self) {
                IS_BACKWARD.set(self.0);
            }
        }
        let _before = Before(IS_BACKWARD.replace(true));
        compute()
    }
}

type Source = Arc<dyn Fn(LinearPass) -> Tensor<2> + Send + Sync>;
type Hook = Arc<dyn Fn() + Send + Sync>;
type OutBuffer = Arc<dyn Fn() -> Option<Tensor<2>> + Send + Sync>;

impl MainGrad {
    /// From now on gradients are accumulated here, for a caller that takes them.
    pub fn attach(&self) {
        self.lock().attached = true;
    }

    /// Sets the callback that provides memory for a new sum,
    /// [sliced from a larger buffer](crate::bucket_slice). It is called by the thread that runs
    /// backward. The sum may use that memory or be elsewhere: see [`crate::is_view_of`].
    pub fn with_out_buffer(&self, room: impl Fn() -> Option<Tensor<2>> + Send + Sync + 'static) {
        self.lock().room = Some(Arc::new(room));
    }

    /// Sets a listener that is called after each gradient is added, by the thread that runs
    /// backward.
    pub fn on_gradient(&self, listener: impl Fn() + Send + Sync + 'static) {
        self.lock().on_gradient = Some(Arc::new(listener));
    }

    /// Sets a listener that is called before forward reads the weight, by the thread that runs
    /// forward: for weights whose all-gather may still be in flight.
    pub fn on_use(&self, listener: impl Fn() + Send + Sync + 'static) {
        self.lock().on_use = Some(Arc::new(listener));
    }

    /// Sets the source of the weight, which is called by the reading thread whenever the weight is
    /// read. The tensor that the layer holds instead only needs the weight's shape, dtype and node
    /// in the graph, and is what is saved for backward.
    pub fn with_source(&self, source: impl Fn(LinearPass) -> Tensor<2> + Send + Sync + 'static) {
        self.lock().source = Some(Arc::new(source));
    }

    /// Whether the weight has a source.
    pub fn has_source(&self) -> bool {
        self.lock().source.is_some()
    }

    /// The weight from its source, if it has one.
    pub fn weight(&self, pass: LinearPass) -> Option<Tensor<2>> {
        let source = self.lock().source.clone();
        let pass = if IS_BACKWARD.get() {
            LinearPass::Backward
        } else {
            pass
        };
        source.map(|source| source(pass))
    }

    /// Calls the listener for reads of the weight.
    pub fn notify_use(&self) {
        let listener = self.lock().on_use.clone();
        if let Some(listener) = listener {
            listener();
        }
    }

    /// Whether gradients are summed here.
    pub fn is_attached(&self) -> bool {
        self.lock().attached
    }

    /// Takes the sum since it was last taken; `None` if there was no gradient.
    ///
    /// # Shapes
    /// As the weight, in f32.
    pub fn take(&self) -> Option<Tensor<2>> {
        self.lock().sum.take()
    }

    /// Panics if the sum is of a weight whose shape is not `dims`.
    pub fn check(&self, op: &str, dims: [usize; 2]) {
        let Some(of) = self.lock().sum.as_ref().map(Tensor::dims) else {
            return;
        };
        assert!(
            of == dims,
            "{op}: the main gradient is for a weight {of:?}, not {dims:?}"
        );
    }

    /// Replaces the sum by `add(sum, buffer)`. `buffer()` provides memory for a new sum, and `None`
    /// if there is a sum already.
    pub fn update(
        &self,
        add: impl FnOnce(Option<Tensor<2>>, &dyn Fn() -> Option<Tensor<2>>) -> Tensor<2>,
    ) {
        self.update_by_part(add);
        self.notify();
    }

    /// Like [`update`](Self::update), for a part of a gradient. After the last part the caller must
    /// [notify](Self::notify) the listener.
    pub fn update_by_part(
        &self,
        add: impl FnOnce(Option<Tensor<2>>, &dyn Fn() -> Option<Tensor<2>>) -> Tensor<2>,
    ) {
        // Callbacks may take locks of their own, so no lock is held while they run.
        let (sum, room) = {
            let mut state = self.lock();
            (state.sum.take(), state.room.clone())
        };
        let is_first = sum.is_none();
        let sum = add(sum, &|| {
            room.as_ref().filter(|_| is_first).and_then(|room| room())
        });
        self.lock().sum = Some(sum);
    }

    /// Calls the listener for added gradients.
    pub fn notify(&self) {
        let listener = self.lock().on_gradient.clone();
        if let Some(listener) = listener {
            listener();
        }
    }

    /// Whether all of them are distinct.
    pub fn are_distinct(all: &[&Self]) -> bool {
        let places: HashSet<_> = all
            .iter()
            .map(|main_grad| Arc::as_ptr(&main_grad.0))
            .collect();
        places.len() == all.len()
    }

    /// [`update`](Self::update) of several distinct main gradients at once: `add` gets the sum of
    /// each, or a buffer for it.
    pub fn update_all(all: &[&Self], add: impl FnOnce(Vec<AccumTarget>) -> Vec<Tensor<2>>) {
        let before = all.iter().map(|main_grad| {
            let (sum, room) = {
                let mut state = main_grad.lock();
                (state.sum.take(), state.room.clone())
            };
            match sum {
                Some(sum) => AccumTarget {
                    sum: Some(sum),
                    room: None,
                },
                None => AccumTarget {
                    sum: None,
                    room: room.and_then(|room| room()),
                },
            }
        });
        let sums = add(before.collect());
        for (main_grad, sum) in all.iter().zip(sums) {
            main_grad.lock().sum = Some(sum);
            main_grad.notify();
        }
    }

    fn lock(&self) -> MutexGuard<'_, MainGradState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for MainGrad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        let shape = state.sum.as_ref().map(Tensor::dims);
        f.debug_struct("MainGrad")
            .field("attached", &state.attached)
            .field("sum", &shape)
            .finish()
    }
}

/// The weight to compute with: from the [source](MainGrad::with_source) of `main_grad` if it has
/// one, otherwise `weight`.
pub fn read_weight<B: IntoPrimitive>(
    weight: FloatTensor<B>,
    main_grad: Option<&MainGrad>,
    pass: LinearPass,
) -> FloatTensor<B> {
    main_grad
        .and_then(|main_grad| main_grad.weight(pass))
        .map_or(weight, B::unwrap)
}
