//! The largest attention logit of each head, as training finds it.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use burn::tensor::{Tensor, Transaction};
use megaburn_kernels::{AttentionOptions, largest_scores};

/// The largest attention logits of a layer's heads on this rank since the last
/// [`take`](Self::take). Copies of the layer share them.
#[derive(Clone, Debug)]
pub(crate) struct MaxLogits {
    /// Index of the rank's first query head, and the number of query heads over all ranks.
    first_head: usize,
    num_heads: usize,
    /// Features of queries and keys whose product is a logit; the features of ALiBi follow them.
    features: usize,
    found: Arc<Mutex<Found>>,
}

/// For the first of some of the rank's heads and their number, the largest logit of each, on the
/// device.
type Found = BTreeMap<[usize; 2], Tensor<1>>;

impl MaxLogits {
    pub(crate) fn new(first_head: usize, num_heads: usize, features: usize) -> Self {
        Self {
            first_head,
            num_heads,
            features,
            found: Arc::default(),
        }
    }

    /// Index of the rank's first query head.
    pub(crate) fn first_head(&self) -> usize {
        self.first_head
    }

    /// A recorder for the rank's heads from `head` on.
    pub(crate) fn recorder(&self, head: usize) -> MaxLogitsRecorder {
        MaxLogitsRecorder {
            all: self.clone(),
            head,
        }
    }

    /// Returns the largest logit of each head of the full layer since the last call; minus infinity
    /// for a head without one, such as those of other ranks. Waits for the device.
    ///
    /// # Errors
    /// The device cannot be read.
    pub(crate) fn take(&self) -> Result<Vec<f64>, String> {
        let found = std::mem::take(&mut *self.lock());
        let mut largest = vec![f64::NEG_INFINITY; self.num_heads];
        for ([head, _], logits) in found {
            let read = Transaction::default().register(logits);
            let read = read.try_execute().map_err(|error| error.to_string())?;
            let own = largest[self.first_head + head..].iter_mut();
            own.zip(read[0].iter::<f64>())
                .for_each(|(largest, logit)| *largest = largest.max(logit));
        }
        Ok(largest)
    }

    fn lock(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records the largest logits of some of a rank's heads.
#[derive(Clone, Debug)]
pub(crate) struct MaxLogitsRecorder {
    all: MaxLogits,
    /// The first of these heads, counted among the rank's heads.
    head: usize,
}

impl MaxLogitsRecorder {
    /// Records the logits of queries and keys. Does not wait for the device.
    ///
    /// # Shapes
    /// `q: [s_q, b, hq, d]`, `k: [s_k, b, hkv, d]`
    pub(crate) fn add(&self, [q, k]: [&Tensor<4>; 2], options: &AttentionOptions) {
        let features = self.all.features;
        let [q, k] = [q, k].map(|x| {
            let x = if x.device().is_autodiff() {
                x.clone().inner()
            } else {
                x.clone()
            };
            if x.dims()[3] == features {
                x
            } else {
                x.narrow(3, 0, features)
            }
        });
        let heads = [self.head, q.dims()[2]];
        let logits = largest_scores(q, k, options.clone());
        let mut found = self.all.lock();
        let logits = match found.remove(&heads) {
            Some(before) => before.max_pair(logits),
            None => logits,
        };
        found.insert(heads, logits);
    }
}
