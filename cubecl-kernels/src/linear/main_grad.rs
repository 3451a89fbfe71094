#[cfg(feature = "cuda")]
use std::collections::HashSet;
use std::{
    cell::Cell,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burn::tensor::Tensor;

/// Where the gradient of a weight is summed in f32 by the product that computes it, micro-batch
/// after micro-batch, instead of through Burn's `Gradients` (Megatron's `main_grad`, with
/// `gradient_accumulation_fusion`).
///
/// A layer holds one for its weight and gives it to [`linear`](crate::linear). Until an optimizer
/// [attaches](Self::attach) itself it does nothing, and the weight gets an ordinary gradient. Whoever keeps
/// the weight itself is [asked for it](Self::with_source) here too. Clones share all of it.
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

/// Where a gradient is summed: a sum that is there, or room for one, if somebody has it.
#[cfg(feature = "cuda")]
pub(crate) struct AccumTarget {
    pub(crate) sum: Option<Tensor<2>>,
    pub(crate) room: Option<Tensor<2>>,
}

/// What a weight is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinearPass {
    /// A layer's result.
    Forward,
    /// The gradient of its input, or its result [again](Pass::backward) for that.
    Backward,
}

thread_local! {
    static IS_BACKWARD: Cell<bool> = const { Cell::new(false) };
}

impl LinearPass {
    /// Whether something is [computed for a backward](Self::backward) on this thread.
    pub fn is_backward() -> bool {
        IS_BACKWARD.get()
    }

    /// Computes something for a backward: weights that are read within, on this thread, are read in that.
    pub fn backward<T>(compute: impl FnOnce() -> T) -> T {
        /// Also where it panics, and somebody goes on.
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
    /// From now on gradients are summed here, for somebody who takes them.
    pub fn attach(&self) {
        self.lock().attached = true;
    }

    /// Has `room` asked for memory for a new sum, [cut out of a larger buffer](crate::bucket_slice), by the thread
    /// that goes backward. The sum may stand there then, or elsewhere: see [`crate::is_view_of`].
    pub fn with_out_buffer(&self, room: impl Fn() -> Option<Tensor<2>> + Send + Sync + 'static) {
        self.lock().room = Some(Arc::new(room));
    }

    /// Has `listener` called whenever a gradient was added, by the thread that goes backward.
    pub fn on_gradient(&self, listener: impl Fn() + Send + Sync + 'static) {
        self.lock().on_gradient = Some(Arc::new(listener));
    }

    /// Has `listener` called before the weight is read forward, by the thread that goes forward: for
    /// weights that may still be on their way.
    pub fn on_use(&self, listener: impl Fn() + Send + Sync + 'static) {
        self.lock().on_use = Some(Arc::new(listener));
    }

    /// Has `source` asked for the weight whenever it is read, by the thread that reads it. What the layer
    /// holds in its place need only have its shape, type and node in the graph, and is kept for backward
    /// in place of it.
    pub fn with_source(&self, source: impl Fn(LinearPass) -> Tensor<2> + Send + Sync + 'static) {
        self.lock().source = Some(Arc::new(source));
    }

    /// The weight, where somebody else keeps it.
    pub(crate) fn weight(&self, pass: LinearPass) -> Option<Tensor<2>> {
        let source = self.lock().source.clone();
        let pass = if IS_BACKWARD.get() {
            LinearPass::Backward
        } else {
            pass
        };
        source.map(|source| source(pass))
    }

    /// Says that the weight is read.
    pub(crate) fn notify_use(&self) {
        let listener = self.lock().on_use.clone();
        if let Some(listener) = listener {
            listener();
        }
    }

    /// Whether gradients are summed here.
    pub fn is_attached(&self) -> bool {
        self.lock().attached
    }

    /// The sum since it was last taken; `None` if there was no gradient.
    ///
    /// # Shapes
    /// As the weight, in f32.
    pub fn take(&self) -> Option<Tensor<2>> {
        self.lock().sum.take()
    }

    /// Panics if what is summed here is of a weight of other `dims`.
    pub(crate) fn check(&self, op: &str, dims: [usize; 2]) {
        let Some(of) = self.lock().sum.as_ref().map(Tensor::dims) else {
            return;
        };
        assert!(
            of == dims,
            "{op}: the main gradient is of a weight {of:?}, not {dims:?}"
        );
    }

    /// Replaces the sum by what `add` makes of it, and of room for it if it asks for some: there is none
    /// where there is a sum.
    pub(crate) fn update(
        &self,
        add: impl FnOnce(Option<Tensor<2>>, &dyn Fn() -> Option<Tensor<2>>) -> Tensor<2>,
    ) {
        self.update_by_part(add);
        self.notify();
    }

    /// The same of a part of a gradient, behind whose last part its listener is to be [told](Self::tell).
    pub(crate) fn update_by_part(
        &self,
        add: impl FnOnce(Option<Tensor<2>>, &dyn Fn() -> Option<Tensor<2>>) -> Tensor<2>,
    ) {
        // Nothing is locked while others are called, who may lock what is theirs.
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

    /// Says that a gradient was added.
    pub(crate) fn notify(&self) {
        let listener = self.lock().on_gradient.clone();
        if let Some(listener) = listener {
            listener();
        }
    }

    /// Whether no two of them are the same one.
    #[cfg(feature = "cuda")]
    pub(crate) fn are_distinct(all: &[&Self]) -> bool {
        let places: HashSet<_> = all
            .iter()
            .map(|main_grad| Arc::as_ptr(&main_grad.0))
            .collect();
        places.len() == all.len()
    }

    /// [`update`](Self::update) of several together, each another one: `add` gets the sum of each or room for it.
    #[cfg(feature = "cuda")]
    pub(crate) fn update_all(all: &[&Self], add: impl FnOnce(Vec<AccumTarget>) -> Vec<Tensor<2>>) {
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

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Int, TensorData};
    use rstest::rstest;

    use super::*;
    use crate::testing::{constant, device, leaf, values};
    use crate::{
        CrossEntropyOptions, EmbeddingOptions, LinearOptions, embedding, linear,
        linear_cross_entropy,
    };

    /// The three that read a weight, in a graph: result, and what its gradients are.
    fn of(what: &str, weight: Tensor<2>, main: &MainGrad, x: Tensor<3>) -> Vec<Vec<f64>> {
        let ids = TensorData::new((0..12).map(|i| i % 9).collect::<Vec<i64>>(), [4, 3]);
        let ids = Tensor::<2, Int>::from_data(ids, &device());
        let x = leaf(x);
        let main_grad = Some(main.clone());
        let linear_options = LinearOptions {
            out_in: true,
            main_grad: main_grad.clone(),
            ..Default::default()
        };
        let y = match what {
            "linear" => linear(x.clone(), weight.clone(), None, linear_options),
            "embedding" => {
                let options = EmbeddingOptions {
                    first: None,
                    main_grad,
                };
                embedding(weight.clone(), ids, options)
            }
            _ => linear_cross_entropy(
                x.clone(),
                weight.clone(),
                ids,
                linear_options,
                CrossEntropyOptions::new(9),
                5,
                |own| own,
            )
            .unsqueeze_dim(2),
        };
        let found = y.clone().inner();
        let grads = (y.clone() * y).sum().backward();
        let for_x = x.grad(&grads).map(values).unwrap_or_default();
        let for_w = main
            .take()
            .or_else(|| weight.grad(&grads))
            .expect("a gradient");
        vec![values(found), for_x, values(for_w)]
    }

    #[rstest]
    #[case("linear", &[LinearPass::Forward, LinearPass::Backward])]
    #[case("embedding", &[LinearPass::Forward])]
    #[case("loss", &[LinearPass::Forward, LinearPass::Backward])]
    fn a_weight_that_somebody_else_keeps_is_asked_for(
        #[case] what: &str,
        #[case] passes: &[LinearPass],
        #[values(true, false)] attached: bool,
        #[values(DType::F32, DType::BF16)] dtype: DType,
    ) {
        let weight = constant([9, 6]).cast(dtype);
        let x = constant([4, 3, 6]).cast(dtype);
        let main = || {
            let main = MainGrad::default();
            if attached {
                main.attach();
            }
            main
        };
        let expected = of(what, leaf(weight.clone()), &main(), x.clone());
        let kept = main();
        let weight = weight.inner();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let noted = asked.clone();
        let whole = weight.clone();
        kept.with_source(move |pass| {
            noted.lock().unwrap().push(pass);
            whole.clone()
        });
        let nothing = Tensor::<2>::full([1, 1], f32::NAN, (&device(), dtype)).expand([9, 6]);
        assert_eq!(of(what, leaf(nothing), &kept, x), expected);
        assert_eq!(*asked.lock().unwrap(), passes);
    }
}
