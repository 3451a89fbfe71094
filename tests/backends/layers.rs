//! Layers, forward and backward.

use burn::{
    module::{Module, ModuleVisitor, Param},
    nn::Initializer,
    prelude::{Device, Int},
    tensor::{Gradients, Tensor, TensorData},
};
use megaburn::{
    collective::{Group, ProcessGroups},
    kernels::RopeConfig,
    mesh::{Axis, FusedPart, Layout, PositionRng, Purpose, ShardSpec},
    parallel::{
        Attention, BatchContext, CrossEntropyConfig, Mlp, MlpConfig, Moe, MoeConfig, MoeOptions,
        Norm, NormConfig, ParallelError, QkNorm, SelfAttentionConfig, Sharded,
        VocabParallelEmbedding, VocabParallelEmbeddingConfig, shard_plan,
    },
};
use megaburn_test_support::gather::{LocalParams, gather};

use crate::world::{Over, Values, on_ranks};

/// The seed of weights and inputs.
const SEED: u64 = 3;

/// The shapes of the inputs, `[seq, batch, features]`.
const SHAPES: [[usize; 3]; 2] = [[8, 2, 12], [6, 1, 7]];

/// The tokens of the vocabulary, which two ranks do not divide.
const VOCAB: usize = 13;

/// What is run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LayerCase {
    Mlp,
    RmsNorm,
    LayerNorm,
    Embedding,
    Attention,
    Experts,
}

impl LayerCase {
    pub(crate) const ALL: [Self; 6] = [
        Self::Mlp,
        Self::RmsNorm,
        Self::LayerNorm,
        Self::Embedding,
        Self::Attention,
        Self::Experts,
    ];

    /// The name of its row.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mlp => "layers: column and row split, SwiGLU",
            Self::RmsNorm => "layers: RMSNorm",
            Self::LayerNorm => "layers: LayerNorm",
            Self::Embedding => "layers: vocabulary split, cross entropy",
            Self::Attention => "layers: attention",
            Self::Experts => "layers: mixture of experts",
        }
    }

    /// Outputs, and the gradients of the input and of every parameter, in full: at each shape, with
    /// and without sequence parallelism.
    pub(crate) fn run(self, ranks: usize, device: &Device) -> Result<Values, String> {
        let mut found = Values::new();
        for shape in SHAPES {
            for sequence_parallel in [false, true] {
                // The layer of experts needs it, and has no use for it on one rank.
                if matches!(self, Self::Experts) && !sequence_parallel {
                    continue;
                }
                let trial = Trial {
                    ranks,
                    device,
                    shape,
                    sequence_parallel: sequence_parallel && ranks > 1,
                };
                let named = |(name, values): (String, Vec<f32>)| {
                    let sequence = if sequence_parallel { ", sp" } else { "" };
                    (format!("{name} at {shape:?}{sequence}"), values)
                };
                found.extend(self.tried(&trial)?.into_iter().map(named));
            }
        }
        Ok(found)
    }

    fn tried(self, trial: &Trial) -> Result<Values, String> {
        let Trial {
            shape: [seq, batch, d_model],
            sequence_parallel,
            ..
        } = *trial;
        match self {
            Self::Mlp => {
                let config = MlpConfig::gated(d_model, 24)
                    .with_bias(true)
                    .with_name("mlp");
                let config = config.with_sequence_parallel(sequence_parallel);
                trial.run(
                    |group, device| config.init(group, device),
                    |mlp: &Mlp, x, _| mlp.forward(x),
                )
            }
            Self::RmsNorm | Self::LayerNorm => {
                let config = match self {
                    Self::RmsNorm => NormConfig::rms(d_model),
                    _ => NormConfig::layer(d_model),
                };
                let config = config.with_sequence_parallel(sequence_parallel);
                trial.run(
                    |group, device| Ok(config.init(group, device)),
                    |norm: &Norm, x, _| {
                        let (y, sum) = norm.forward_add(x.clone().tanh(), x);
                        y * sum
                    },
                )
            }
            Self::Embedding => {
                let config = VocabParallelEmbeddingConfig::new(VOCAB, d_model)
                    .with_sequence_parallel(sequence_parallel)
                    .with_name("embedding");
                let ids = |device: &Device| {
                    let ids = (0..seq * batch).map(|i| (i * 7 % VOCAB) as i64).collect();
                    Tensor::<2, Int>::from_data(TensorData::new(ids, [seq, batch]), device)
                };
                trial.run(
                    |group, device| config.init(group, device),
                    |layer: &VocabParallelEmbedding, x, group| {
                        let ids = ids(&x.device());
                        let logits = layer.logits(layer.forward(ids.clone()) + x);
                        let loss = CrossEntropyConfig::new(VOCAB).with_label_smoothing(0.1);
                        let loss = loss.init(group).expect("the configuration is right");
                        loss.forward(logits, ids.flip([0])).unsqueeze_dim(2)
                    },
                )
            }
            Self::Attention => {
                let config = SelfAttentionConfig::new(d_model, 4, 2, 4)
                    .with_qkv_bias(true)
                    .with_qk_norm(Some(QkNorm::new()))
                    .with_window(Some(5))
                    // Scores that matter.
                    .with_initializer(Initializer::Normal {
                        mean: 0.0,
                        std: 0.4,
                    })
                    .with_sequence_parallel(sequence_parallel)
                    .with_name("attention");
                trial.run(
                    |group, device| config.init(group, device),
                    |layer: &Attention, x, _| {
                        let rope = RopeConfig::new(4).init(0..seq, &x.device());
                        layer.forward(x, Some(&rope.expect("the head is even")))
                    },
                )
            }
            Self::Experts => {
                let config = MoeConfig::new(d_model, 10, 4, 2)
                    .with_shared_ffn(Some(8))
                    .with_initializer(Initializer::Normal {
                        mean: 0.0,
                        std: 0.4,
                    })
                    .with_sequence_parallel(sequence_parallel)
                    .with_name("moe");
                let context = BatchContext {
                    loss_factor: Some(1.0),
                    ..BatchContext::default()
                };
                let layout = Layout {
                    tp: trial.ranks,
                    etp: trial.ranks,
                    sp: sequence_parallel,
                    ..Layout::SINGLE
                };
                trial.run(
                    |group, device| {
                        let groups = ProcessGroups::new(group, layout)?;
                        config.init(&groups, MoeOptions::default(), device)
                    },
                    |layer: &Moe, x, _| layer.forward(x, &context),
                )
            }
        }
    }
}

/// The ranks that a layer runs on, all of one tensor-parallel group, and its input.
struct Trial<'a> {
    ranks: usize,
    device: &'a Device,
    shape: [usize; 3],
    sequence_parallel: bool,
}

impl Trial<'_> {
    /// Builds the layer on every rank, feeds it random numbers, and differentiates the inner product of
    /// its output with others.
    fn run<M: Module + Sharded>(
        &self,
        build: impl Fn(&Group, &Device) -> Result<M, ParallelError> + Sync,
        forward: impl Fn(&M, Tensor<3>, &Group) -> Tensor<3> + Sync,
    ) -> Result<Values, String> {
        let ranks = on_ranks(Over::Threads, self.ranks, SEED, |group| {
            let device = self.device.clone().autodiff();
            let layer = build(&group, &device)?;
            let spec = self.stream(self.shape, &group);
            let x = own(normal(self.shape, "input", &device), &spec, &group);
            let x = Tensor::from_inner(x.inner()).require_grad();
            let y = forward(&layer, x.clone(), &group);
            let [len, batch, features] = y.dims();
            // The losses of all tokens are on every rank.
            let is_whole = len == self.shape[0];
            let shape = [self.shape[0], batch, features];
            let output_spec = match is_whole {
                true => whole(shape, &group),
                false => self.stream(shape, &group),
            };
            let weight = own(normal(shape, "weight", &device), &output_spec, &group);
            let grads = (y.clone() * weight).sum().backward();

            let plan = shard_plan(&layer)?;
            let of_input = x.grad(&grads).expect("the input has a gradient");
            let mut found: LocalParams = vec![
                ("output".into(), floats(y.inner()), output_spec),
                ("gradient of the input".into(), floats(of_input), spec),
            ];
            for (path, grad) in gradients(&layer, &grads) {
                let spec = plan.get(&path).expect("the plan has all parameters");
                found.push((format!("gradient of {path}"), grad, spec.shard.clone()));
            }
            Ok::<_, ParallelError>(found)
        })?;
        Ok(gather(&ranks))
    }

    /// Which part of the residual stream a rank has.
    fn stream(&self, shape: [usize; 3], group: &Group) -> ShardSpec {
        if !self.sequence_parallel {
            return whole(shape, group);
        }
        let (rank, size) = (group.rank(), group.size());
        let parts = [FusedPart::new(shape[0])];
        ShardSpec::split(&shape, 0, &parts, Axis::Tp, rank, size).expect("the ranks divide it")
    }
}

fn whole(shape: [usize; 3], group: &Group) -> ShardSpec {
    ShardSpec::whole(&shape, Axis::Tp, group.rank(), group.size())
}

/// A rank's part of a tensor.
fn own(x: Tensor<3>, spec: &ShardSpec, group: &Group) -> Tensor<3> {
    let len = spec.local_shape()[0];
    match len == x.dims()[0] {
        true => x,
        false => x.narrow(0, group.rank() * len, len),
    }
}

fn normal(shape: [usize; 3], what: &str, device: &Device) -> Tensor<3> {
    let mut values = vec![0.0f32; shape.iter().product()];
    PositionRng::new(SEED, Purpose::Sampling, what).fill_normal(0, &mut values);
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn floats<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

/// The gradients of all parameters by path; zeros where backward did not arrive, as at an expert without
/// tokens.
fn gradients<M: Module>(layer: &M, grads: &Gradients) -> Vec<(String, Vec<f32>)> {
    let mut visitor = GradientVisitor {
        path: Vec::new(),
        grads,
        found: Vec::new(),
    };
    layer.visit(&mut visitor);
    visitor.found
}

struct GradientVisitor<'a> {
    path: Vec<String>,
    grads: &'a Gradients,
    found: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for GradientVisitor<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        let grad = value.grad(self.grads);
        let grad = grad.unwrap_or_else(|| value.inner().zeros_like());
        self.found.push((self.path.join("."), floats(grad)));
    }
}
