//! Random data, shards of plain data, and comparisons.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use burn::{
    module::{Module, ModuleVisitor, Param},
    prelude::Device,
    tensor::{Gradients, Tensor, TensorData},
};
use megaburn_collective::{Group, GroupOptions, run_threads};
use megaburn_mesh::{PositionRng, Purpose, ShardSpec};

/// A fresh seed, printed so that a failure can be reproduced.
pub(crate) fn fresh_seed() -> u64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_nanos() as u64;
    println!("seed {now}");
    now
}

pub(crate) fn autodiff() -> Device {
    Device::flex().autodiff()
}

/// Standard normal numbers.
pub(crate) fn normal(shape: &[usize], seed: u64, what: &str) -> TensorData {
    let mut values = vec![0.0f32; shape.iter().product()];
    PositionRng::new(seed, Purpose::Sampling, what).fill_normal(0, &mut values);
    TensorData::new(values, shape.to_vec())
}

/// Integers below `bound`.
pub(crate) fn tokens(shape: [usize; 2], bound: usize, seed: u64, what: &str) -> TensorData {
    let rng = PositionRng::new(seed, Purpose::Sampling, what);
    let count = (shape[0] * shape[1]) as u64;
    TensorData::new(
        (0..count)
            .map(|i| rng.below(i, bound as u64) as i64)
            .collect(),
        shape,
    )
}

pub(crate) fn leaf<const D: usize>(data: TensorData) -> Tensor<D> {
    Tensor::from_data(data, &autodiff()).require_grad()
}

/// Runs `body` on `ranks` threads with the run's seed `seed`; panics with the first rank's failure.
pub(crate) fn on_ranks<T: Send>(
    ranks: usize,
    seed: u64,
    body: impl Fn(Group) -> T + Sync,
) -> Vec<T> {
    let options = GroupOptions {
        seed,
        timeout: Duration::from_secs(60),
        ..Default::default()
    };
    let results = run_threads(ranks, options, |group| {
        Ok::<_, std::convert::Infallible>(body(group))
    });
    results
        .into_iter()
        .map(|rank| rank.unwrap_or_else(|failure| panic!("{failure}")))
        .collect()
}

pub(crate) fn floats(data: &TensorData) -> Vec<f32> {
    data.clone().try_to_vec().expect("data in f32")
}

/// The local shard of `whole` under `spec`. It is 0 in padding and, with `owned`, in replicas that
/// another rank owns.
pub(crate) fn cut(whole: &TensorData, spec: &ShardSpec, owned: bool) -> TensorData {
    let whole = floats(whole);
    let shape = spec.local_shape();
    let mut local = vec![0.0; shape.iter().product()];
    for piece in spec
        .pieces
        .iter()
        .filter(|piece| !owned || piece.replica == 0)
    {
        spec.for_each_run(piece, |l, g, n| {
            local[l..l + n].copy_from_slice(&whole[g..g + n])
        });
    }
    TensorData::new(local, shape)
}

/// The full tensor joined from all ranks' shards. Replicas must be equal bit for bit, and padding
/// must be zero.
pub(crate) fn join(what: &str, shards: &[(ShardSpec, TensorData)]) -> TensorData {
    let mut whole = vec![None; shards[0].0.num_global()];
    for (rank, (spec, local)) in shards.iter().enumerate() {
        assert_eq!(
            local.shape().to_vec(),
            spec.local_shape(),
            "{what} on rank {rank}"
        );
        let local = floats(local);
        let mut padding = vec![true; local.len()];
        for piece in &spec.pieces {
            spec.for_each_run(piece, |l, g, n| {
                for i in 0..n {
                    let at = &mut whole[g + i];
                    let value = local[l + i];
                    let first = *at.get_or_insert(value);
                    assert_eq!(
                        first.to_bits(),
                        value.to_bits(),
                        "{what}: copies differ at {}",
                        g + i
                    );
                    padding[l + i] = false;
                }
            });
        }
        let padded = local.iter().zip(padding).filter(|(_, padding)| *padding);
        assert!(
            padded.into_iter().all(|(&value, _)| value == 0.0),
            "{what}: padding on rank {rank}"
        );
    }
    let whole: Vec<f32> = whole
        .into_iter()
        .map(|value| value.expect("held by a rank"))
        .collect();
    TensorData::new(whole, shards[0].0.global_shape.clone())
}

/// Asserts `|a - b| <= tolerance * |b|` in the Euclidean norm.
pub(crate) fn assert_close(what: &str, a: &TensorData, b: &TensorData, tolerance: f64) {
    assert_eq!(a.shape(), b.shape(), "{what}");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let a = floats(a);
    let b = floats(b);
    let off = norm(&mut a.iter().zip(&b).map(|(&a, &b)| f64::from(a) - f64::from(b)));
    let size = norm(&mut b.iter().map(|&b| f64::from(b)));
    assert!(
        off <= tolerance * size,
        "{what}: differs by {off:e} of {size:e}"
    );
}

pub(crate) fn assert_bits(what: &str, a: &TensorData, b: &TensorData) {
    assert_eq!((a.shape(), a.dtype()), (b.shape(), b.dtype()), "{what}");
    assert_eq!(a.as_bytes(), b.as_bytes(), "{what}: the bits differ");
}

/// The gradients of all parameters by path.
pub(crate) fn param_grads<M: Module>(module: &M, grads: &Gradients) -> Vec<(String, TensorData)> {
    let mut visitor = GradVisitor {
        path: Vec::new(),
        grads,
        found: Vec::new(),
    };
    module.visit(&mut visitor);
    visitor.found
}

struct GradVisitor<'a> {
    path: Vec<String>,
    grads: &'a Gradients,
    found: Vec<(String, TensorData)>,
}

impl ModuleVisitor for GradVisitor<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let value = param.val();
        // Backward does not reach the biases of experts if no row of this rank has one of them.
        let may_lack = path.starts_with("experts.") && path.ends_with(".bias");
        let grad = match value.grad(self.grads) {
            None if may_lack => value.inner().zeros_like(),
            grad => grad.unwrap_or_else(|| panic!("no gradient of {path}")),
        };
        self.found.push((path, grad.into_data()));
    }
}
