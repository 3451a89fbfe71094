//! What Hugging Face Transformers computes on tiny models, under every layout.

use std::{collections::BTreeMap, path::PathBuf};

use burn::{
    prelude::{Device, Int},
    tensor::{Tensor, TensorData},
};
use megaburn::{
    collective::{GroupOptions, ProcessGroups, run_threads},
    mesh::Layout,
    models::{
        Llama, LlamaConfig,
        hf::{HfKeys, HfTensors, cut},
    },
    parallel::{load_params, shard_plan},
};
use rstest::rstest;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Largest differences from the reference over what this rank sees.
#[derive(Debug, Default)]
struct Differences {
    logits: f32,
    loss: f32,
    /// By parameter: (sum of squared differences, sum of squares of the reference).
    grads: BTreeMap<String, [f64; 2]>,
}

fn max_abs(a: &TensorData, b: &TensorData) -> f32 {
    assert_eq!(a.shape(), b.shape());
    let (a, b) = (a.try_to_vec::<f32>().unwrap(), b.try_to_vec::<f32>().unwrap());
    a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// `[batch, seq, ..]` of the fixtures as `[seq, batch, ..]`.
fn seq_first(data: TensorData, device: &Device) -> Tensor<2, Int> {
    Tensor::<2, Int>::from_data(data, device).swap_dims(0, 1)
}

fn compare(name: &str, groups: &ProcessGroups) -> Result<Differences, Failure> {
    let dir = fixture(name);
    let config = LlamaConfig::from_hf(&dir.join("config.json"))?;
    let weights = HfTensors::open(&dir.join("model.safetensors"))?;
    let reference = HfTensors::open(&dir.join("reference.safetensors"))?;
    let plain = Device::flex();
    let device = plain.clone().autodiff();
    let model = config.init(&groups.tp, groups.layout().sp, &device)?;
    let plan = shard_plan(&model)?;
    let model = load_params(model, |path, _| {
        let source = Llama::hf_source(path).expect("every parameter has a source");
        weights.shard(&source, "", &plan.get(path).expect("planned").shard)
    })?;

    let ids = seq_first(reference.tensor("input_ids")?, &plain);
    let [seq, batch] = ids.dims();
    let share = batch / groups.dp.size();
    let ids = ids.narrow(1, groups.dp.rank() * share, share);
    let last = Tensor::<2, Int>::full([1, share], -100, &plain);
    let labels = Tensor::cat(vec![ids.clone().narrow(0, 1, seq - 1), last], 0);

    let expected: Tensor<3> = Tensor::from_data(reference.tensor("logits")?, &plain);
    let expected = expected.swap_dims(0, 1).narrow(1, groups.dp.rank() * share, share);
    let logits = model.full_logits(ids.clone()).inner();
    let mut found = Differences {
        logits: max_abs(&logits.into_data(), &expected.into_data()),
        ..Default::default()
    };

    let (sum, tokens) = model.loss(ids, labels);
    let total = groups
        .dp
        .all_reduce(sum.clone().inner().into_data(), megaburn::collective::ReduceOp::Sum)?;
    let loss = total.try_to_vec::<f32>()?[0] / (tokens * groups.dp.size()) as f32;
    found.loss = (loss - reference.tensor("loss")?.try_to_vec::<f32>()?[0]).abs();

    let mut grads = sum.backward();
    found.grads = gradients::compare(&model, &mut grads, |path, grad: TensorData| {
        let grad = groups.dp.all_reduce(grad, megaburn::collective::ReduceOp::Sum)?;
        let source = Llama::hf_source(path).expect("every parameter has a source");
        let whole = reference.parameter(&source, "grad.")?;
        let expected = cut(&whole, &plan.get(path).expect("planned").shard);
        let scale = 1.0 / (tokens * groups.dp.size()) as f32;
        let (a, b) = (grad.try_to_vec::<f32>()?, expected.try_to_vec::<f32>()?);
        let difference =
            a.iter().zip(&b).map(|(a, b)| f64::from(a * scale - b).powi(2)).sum::<f64>();
        Ok([difference, b.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>()])
    })?;
    Ok(found)
}

mod gradients {
    use std::collections::BTreeMap;

    use burn::{
        module::{Module, ModuleVisitor, Param},
        tensor::{Gradients, Tensor, TensorData},
    };

    use super::Failure;

    /// `f(path, local gradient)` for every parameter.
    pub(super) fn compare<M: Module, T>(
        module: &M,
        grads: &mut Gradients,
        f: impl FnMut(&str, TensorData) -> Result<T, Failure>,
    ) -> Result<BTreeMap<String, T>, Failure> {
        let mut visitor = Visitor { path: Vec::new(), grads, f, out: Ok(BTreeMap::new()) };
        module.visit(&mut visitor);
        visitor.out
    }

    struct Visitor<'a, F, T> {
        path: Vec<String>,
        grads: &'a mut Gradients,
        f: F,
        out: Result<BTreeMap<String, T>, Failure>,
    }

    impl<F: FnMut(&str, TensorData) -> Result<T, Failure>, T> ModuleVisitor for Visitor<'_, F, T> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_string());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let path = self.path.join(".");
            let grad = param.val().grad_remove(self.grads);
            let grad = grad.unwrap_or_else(|| panic!("{path} has no gradient"));
            let value = (self.f)(&path, grad.into_data());
            match (&mut self.out, value) {
                (Ok(out), Ok(value)) => drop(out.insert(path, value)),
                (out @ Ok(_), Err(error)) => *out = Err(error),
                _ => {}
            }
        }
    }
}

#[rstest]
fn llama_equals_transformers_under_every_layout(
    #[values("llama", "llama3-scaled")] name: &str,
    #[values("tp1", "tp2", "tp4", "tp8", "dp2", "tp2-sp", "tp4-dp2-sp", "tp8-sp")] layout: Layout,
) {
    let results = run_threads(layout.world_size(), GroupOptions::default(), |world| {
        compare(name, &ProcessGroups::new(&world, layout)?)
    });
    for result in results {
        let found = result.unwrap();
        assert!(found.logits <= 1e-4, "logits {found:?}");
        assert!(found.loss <= 1e-5, "loss {found:?}");
        for (path, [difference, norm]) in &found.grads {
            let relative = (difference / norm.max(1e-30)).sqrt();
            assert!(relative <= 1e-3, "gradient of {path}: {relative} ({name}, {layout})");
        }
    }
}
