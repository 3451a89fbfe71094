mod route;

use burn::{
    module::{Module, Param},
    nn::Initializer,
    prelude::Device,
    tensor::{DType, Tensor},
};
use megaburn_kernels::{RouterOptions, router_logits};
use megaburn_mesh::{Axis, ShardSpec};

use super::{Capacity, ExpertGroups, ExpertLoad, LoadBalance};
use crate::{
    error::ParallelError,
    init::InitDraw,
    replica::Replica,
    shards::{PlanBuilder, Sharded},
};

/// Chooses the experts of each token, in f32. The router is replicated, and each rank routes its
/// own tokens.
///
/// # Collective
/// Forward: the ranks that share the micro-batch, if there are [balancing losses](LoadBalance), if
/// the [capacity](Capacity) is per sequence, or if Sinkhorn's algorithm
/// [chooses](super::BalanceChoice). Backward: with sequence parallelism one all-reduce of the
/// weight's gradient, because each rank sees its own tokens only.
#[derive(Module, Debug)]
pub struct Router {
    /// The weight, `[d_model, num_experts]`: one column per expert.
    pub weight: Param<Tensor<2>>,
    /// The bias that is added to each logit, `[num_experts]`.
    pub logit_bias: Option<Param<Tensor<1>>>,
    /// The bias that is added to each expert's score for the choice only, `[num_experts]`. It has
    /// no gradient.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    replica: Replica,
    #[module(skip)]
    how: RouterPlan,
}

/// The parts of the router that are not parameters.
#[derive(Clone, Debug)]
struct RouterPlan {
    name: Option<String>,
    num_experts: usize,
    options: RouterOptions,
    groups: ExpertGroups,
    balance: LoadBalance,
    capacity: Option<Capacity>,
    load: ExpertLoad,
}

/// What a router is built from.
pub(super) struct RouterParts {
    pub(super) d_model: usize,
    pub(super) num_experts: usize,
    pub(super) options: RouterOptions,
    pub(super) expert_bias: bool,
    pub(super) logit_bias: bool,
    pub(super) sequence_parallel: bool,
    pub(super) initializer: Initializer,
    pub(super) path: Option<String>,
    pub(super) groups: ExpertGroups,
    pub(super) balance: LoadBalance,
    pub(super) capacity: Option<Capacity>,
}

impl Router {
    pub(super) fn new(parts: RouterParts, device: &Device) -> Result<Self, ParallelError> {
        let RouterParts {
            d_model,
            num_experts,
            groups,
            ..
        } = parts;
        let tp = &groups.tp;
        let shape = [d_model, num_experts];
        let draw = InitDraw {
            layer: "Router",
            name: parts.path.as_deref(),
            field: "weight",
            initializer: &parts.initializer,
            fans: shape,
        };
        let spec = ShardSpec::whole(&shape, Axis::Tp, tp.rank(), tp.size());
        // Initialized now: an uninitialized parameter would count as trained.
        let bias = || {
            let zeros = Tensor::<1>::zeros([num_experts], device).set_require_grad(false);
            Param::from_tensor(zeros).set_require_grad(false)
        };
        Ok(Self {
            weight: draw.param(&spec, tp, device)?,
            logit_bias: parts
                .logit_bias
                .then(|| Initializer::Zeros.init([num_experts], device)),
            bias: parts.expert_bias.then(bias),
            replica: Replica::of(tp, parts.sequence_parallel),
            how: RouterPlan {
                name: parts.path,
                num_experts,
                options: parts.options,
                groups,
                balance: parts.balance,
                capacity: parts.capacity,
                load: ExpertLoad::default(),
            },
        })
    }

    /// The load of the experts so far.
    pub fn load(&self) -> &ExpertLoad {
        &self.how.load
    }

    /// The biases by which experts are chosen, if the router has any.
    pub fn biases(&self) -> Option<Vec<f32>> {
        self.bias.as_ref().map(|bias| read(off_graph(&bias.val())))
    }

    /// Replaces the biases, if the router has any.
    ///
    /// # Panics
    /// If the number of biases is not the number of experts.
    pub fn set_bias(&mut self, bias: &[f32]) {
        let value = |old: Tensor<1>| {
            assert_eq!(
                old.dims(),
                [bias.len()],
                "there must be one bias per expert"
            );
            let device = old.device();
            let dtype = old.dtype();
            Tensor::<1>::from_data(bias, &device)
                .cast(dtype)
                .set_require_grad(false)
        };
        self.bias = self.bias.take().map(|bias| bias.map(value));
    }

    pub(super) fn whole_sequence(mut self) -> Self {
        self.how.capacity = None;
        self.replica = self.replica.with_all_rows();
        self
    }

    /// `[tokens, num_experts]` in f32.
    fn logits(&self, x: Tensor<3>) -> Tensor<2> {
        let [seq, batch, d_model] = x.dims();
        let weight = self.weight.val();
        let narrow = (weight.dtype() == DType::BF16).then(|| off_graph(&weight));
        // Cast to f32 first, so that ranks sum its gradients in f32.
        let wide = self.replica.shared(weight.cast(DType::F32));
        let logits = router_logits(x.reshape([seq * batch, d_model]), wide, narrow);
        match &self.logit_bias {
            Some(bias) => {
                let bias = self.replica.shared(bias.val().cast(DType::F32));
                logits + bias.unsqueeze_dim(0)
            }
            None => logits,
        }
    }
}

fn read(x: Tensor<1>) -> Vec<f32> {
    x.cast(DType::F32)
        .into_data()
        .try_to_vec()
        .expect("the tensor is f32")
}

pub(super) fn off_graph<const D: usize>(x: &Tensor<D>) -> Tensor<D> {
    if x.device().is_autodiff() {
        x.clone().inner()
    } else {
        x.clone()
    }
}

impl Sharded for Router {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.drawn_from(self.how.name.as_deref());
        plan.param("weight", &self.replica.spec(&self.weight));
        if let Some(bias) = &self.logit_bias {
            plan.param("logit_bias", &self.replica.spec(bias));
        }
        if let Some(bias) = &self.bias {
            plan.param("bias", &self.replica.spec(bias));
        }
    }
}
