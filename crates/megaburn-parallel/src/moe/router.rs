use burn::{
    module::{Module, Param},
    nn::Initializer,
    prelude::Device,
    tensor::{DType, Tensor, TensorData},
};
use megaburn_collective::region::FAILED_REGION;
use megaburn_kernels::{
    Again, LinearOptions, Pass, RouterOptions, choose_experts, expert_weights, linear,
    router_scores, with_gradient,
};
use megaburn_mesh::{Axis, ShardSpec};

use super::{
    Balance, Capacity, ExpertGroups, ExpertLoad, balance::Tokens, capacity::Slots,
    dispatch::DROPPED,
};
use crate::{ParallelError, PlanBuilder, Sharded, TokenContext, init::Draw, replica::Replica};

/// Chooses the experts of each token, in f32. Every rank has it whole, and chooses for its own tokens.
///
/// # Collective
/// Where losses [balance](Balance) the experts, see there. Backward, with sequence parallelism: one all-reduce
/// of the weight's gradient, as each rank sees its own tokens only.
#[derive(Module, Debug)]
pub struct Router {
    /// A column an expert, `[d_model, num_experts]`.
    pub weight: Param<Tensor<2>>,
    /// What is added to each expert's score for the choice, `[num_experts]`. It has no gradient.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    replica: Replica,
    #[module(skip)]
    how: How,
}

/// What the router holds beside its parameters.
#[derive(Clone, Debug)]
struct How {
    name: Option<String>,
    num_experts: usize,
    options: RouterOptions,
    groups: ExpertGroups,
    balance: Balance,
    capacity: Option<Capacity>,
    load: ExpertLoad,
}

/// What a router is made from.
pub(super) struct RouterParts {
    pub(super) d_model: usize,
    pub(super) num_experts: usize,
    pub(super) options: RouterOptions,
    pub(super) expert_bias: bool,
    pub(super) sequence_parallel: bool,
    pub(super) initializer: Initializer,
    pub(super) path: Option<String>,
    pub(super) groups: ExpertGroups,
}

/// Where tokens go.
pub(super) struct Routed {
    /// `top_k` experts a token, one token's behind the other's.
    pub(super) experts: Vec<u32>,
    /// Their weights, `[tokens, top_k]` in f32.
    pub(super) weights: Tensor<2>,
    /// Rows that every expert is given; none: those that come.
    pub(super) padded: Option<usize>,
}

impl Router {
    pub(super) fn new(parts: RouterParts, device: &Device) -> Result<Self, ParallelError> {
        let RouterParts { d_model, num_experts, groups, .. } = parts;
        let tp = &groups.tp;
        let shape = [d_model, num_experts];
        let draw = Draw {
            layer: "Router",
            name: parts.path.as_deref(),
            field: "weight",
            initializer: &parts.initializer,
            fans: shape,
        };
        let spec = ShardSpec::whole(&shape, Axis::Tp, tp.rank(), tp.size());
        let bias = || Initializer::Zeros.init([num_experts], device).set_require_grad(false);
        Ok(Self {
            weight: draw.param(&spec, tp, device)?,
            bias: parts.expert_bias.then(bias),
            replica: Replica::of(tp, parts.sequence_parallel),
            how: How {
                name: parts.path,
                num_experts,
                options: parts.options,
                groups,
                balance: Balance::default(),
                capacity: None,
                load: ExpertLoad::default(),
            },
        })
    }

    /// What it has seen.
    pub fn load(&self) -> &ExpertLoad {
        &self.how.load
    }

    /// The biases by which experts are chosen; none if there are none.
    pub fn biases(&self) -> Option<Vec<f32>> {
        self.bias.as_ref().map(|bias| read(off_graph(&bias.val())))
    }

    /// Replaces them, where there are any.
    ///
    /// # Panics
    /// If there are as many as others.
    pub fn set_bias(&mut self, bias: &[f32]) {
        let value = |old: Tensor<1>| {
            assert_eq!(old.dims(), [bias.len()], "one bias an expert");
            let (device, dtype) = (old.device(), old.dtype());
            Tensor::<1>::from_data(bias, &device).cast(dtype).set_require_grad(false)
        };
        self.bias = self.bias.take().map(|bias| bias.map(value));
    }

    /// Experts of a token.
    pub(super) fn top_k(&self) -> usize {
        self.how.options.top_k
    }

    pub(super) fn with_balance(mut self, balance: Balance) -> Self {
        self.how.balance = balance;
        self
    }

    pub(super) fn with_capacity(mut self, capacity: Option<Capacity>) -> Self {
        self.how.capacity = capacity;
        self
    }

    pub(super) fn whole_sequence(mut self) -> Self {
        self.how.capacity = None;
        self.replica = self.replica.of_all_rows();
        self
    }

    /// The experts of each token and their weights.
    ///
    /// # Shapes
    /// `x`: `[seq, batch, d_model]`
    pub(super) fn route(&self, x: Tensor<3>, context: &TokenContext) -> Routed {
        let How { options, groups, balance, .. } = &self.how;
        let [seq, batch, _] = x.dims();
        let counted = self.counted(context, seq * batch);
        let mut logits = self.logits(x);
        let tokens = Tokens {
            seq,
            batch,
            top_k: options.top_k,
            group: &groups.tp_cp,
            counted: counted.map(|counted| as_column(counted, &off_graph(&logits))),
        };
        let plain = off_graph(&logits);
        let plain_scores = router_scores(plain.clone(), options.scores);
        let mut experts = self.choose(&plain_scores);
        let counts = context.loss_factor.map(|_| self.counts(&experts, batch, counted));
        let (mut of_scores, mut sums) = (None, None);
        if let (Some(factor), Some(counts)) = (context.loss_factor, &counts)
            && balance.is_some()
        {
            let scores = (plain_scores, options.scores);
            let found = balance.gradients(plain, scores, counts, &tokens, self.load(), factor);
            (of_scores, sums) = (found.of_scores, Some(found.sums));
            if let Some(gradient) = found.of_logits {
                logits = with_gradient(logits, gradient);
            }
        }
        let mut scores = router_scores(logits, options.scores);
        if let Some(gradient) = of_scores {
            scores = with_gradient(scores, gradient);
        }
        let weights = expert_weights(scores, &experts, options);
        if let Some(counted) = counted {
            let slots = experts.chunks_mut(options.top_k).zip(counted);
            slots.filter(|(_, counted)| !**counted).for_each(|(slots, _)| slots.fill(DROPPED));
        }
        let (dropped, padded) = self.drop_from(&mut experts, &weights, [seq, batch], context);
        // What is computed once more was counted.
        if let Some(counts) = counts.filter(|_| !Pass::is_backward()) {
            let all = self.how.num_experts;
            let of_all = |expert| counts.iter().skip(expert).step_by(all).sum();
            self.load().add(&(0..all).map(of_all).collect::<Vec<u64>>(), dropped, sums);
        }
        Routed { experts, weights, padded }
    }

    /// Drops what is too much for some experts: how many slots, and rows that every expert is given.
    fn drop_from(
        &self,
        experts: &mut [u32],
        weights: &Tensor<2>,
        [seq, batch]: [usize; 2],
        context: &TokenContext,
    ) -> (u64, Option<usize>) {
        let How { num_experts, options, groups, capacity, .. } = &self.how;
        let Some(capacity) = capacity else { return (0, None) };
        let documents = context.documents.as_ref();
        let (top_k, num_experts) = (options.top_k, *num_experts);
        let slots = Slots { seq, batch, top_k, num_experts, groups, documents };
        let weights = off_graph(weights);
        let device = weights.device();
        let dropped = capacity.drop_from(experts, &read(weights.flatten(0, 1)), &slots, &device);
        let dropped = dropped.unwrap_or_else(|error| panic!("{FAILED_REGION}{error}"));
        (dropped, capacity.pad.then(|| capacity.rows(&slots)))
    }

    /// `[tokens, num_experts]` in f32.
    fn logits(&self, x: Tensor<3>) -> Tensor<2> {
        let [seq, batch, d_model] = x.dims();
        let weight = self.replica.value(&self.weight).cast(DType::F32);
        let rows = x.reshape([seq * batch, d_model]);
        // The rows are kept by nobody in f32 where they are narrower.
        let source = (rows.dtype() != DType::F32).then(|| off_graph(&rows));
        let again = source.map(|rows| Again::new(move || rows.clone().cast(DType::F32)));
        linear(rows.cast(DType::F32), weight, None, LinearOptions { again, ..Default::default() })
    }

    fn choose(&self, scores: &Tensor<2>) -> Vec<u32> {
        let How { num_experts, options, balance, .. } = &self.how;
        if balance.forced {
            let slots = scores.dims()[0] * options.top_k;
            return (0..slots).map(|slot| (slot % num_experts) as u32).collect();
        }
        let (bias, scores) = (self.biases(), read(scores.clone().flatten(0, 1)));
        choose_experts(&scores, *num_experts, bias.as_deref(), options)
    }

    /// Which of this rank's tokens count, of those that the ranks of its tensor-parallel group share; none: all.
    fn counted<'a>(&self, context: &'a TokenContext, tokens: usize) -> Option<&'a [bool]> {
        let all = context.counted.as_deref()?;
        let start = if all.len() == tokens { 0 } else { self.how.groups.tp.rank() * tokens };
        Some(&all[start..start + tokens])
    }

    /// Tokens that go from each sequence to each expert.
    fn counts(&self, experts: &[u32], batch: usize, counted: Option<&[bool]>) -> Vec<u64> {
        let How { num_experts, options, .. } = &self.how;
        let mut counts = vec![0; batch * num_experts];
        let tokens = experts.chunks(options.top_k).enumerate();
        for (token, chosen) in tokens.filter(|(token, _)| counted.is_none_or(|all| all[*token])) {
            let row = token % batch * num_experts;
            chosen.iter().for_each(|&expert| counts[row + expert as usize] += 1);
        }
        counts
    }
}

fn as_column(counted: &[bool], like: &Tensor<2>) -> Tensor<2> {
    let values: Vec<f32> = counted.iter().map(|&is_counted| f32::from(is_counted)).collect();
    Tensor::from_data(TensorData::new(values, [counted.len(), 1]), (&like.device(), DType::F32))
}

fn read(x: Tensor<1>) -> Vec<f32> {
    x.cast(DType::F32).into_data().try_to_vec().expect("it is f32")
}

fn off_graph<const D: usize>(x: &Tensor<D>) -> Tensor<D> {
    if x.device().is_autodiff() { x.clone().inner() } else { x.clone() }
}

impl Sharded for Router {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.drawn_from(self.how.name.as_deref());
        plan.param("weight", &self.replica.spec(&self.weight));
        if let Some(bias) = &self.bias {
            plan.param("bias", &self.replica.spec(bias));
        }
    }
}
