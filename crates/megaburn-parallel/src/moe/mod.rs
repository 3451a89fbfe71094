//! Mixture of experts: a router sends each token to some of many feed-forward networks, which ranks share
//! out.
//!
//! Source: Shazeer et al. (2017), <https://arxiv.org/abs/1701.06538>; Fedus et al. (2021),
//! <https://arxiv.org/abs/2101.03961>; DeepSeek-AI (2024), <https://arxiv.org/abs/2412.19437>; Megatron-LM
//! `megatron/core/transformer/moe/moe_layer.py`.

mod balance;
mod capacity;
mod config;
mod dispatch;
mod experts;
mod groups;
mod load;
mod quantile;
mod router;
mod sinkhorn;

pub use balance::{BalanceChoice, LoadBalance};
use burn::{module::Module, tensor::Tensor};
pub use capacity::{Capacity, CapacityScope, DropPolicy};
pub use config::MoeConfig;
pub use dispatch::Dispatcher;
use dispatch::{Assignments, Dispatch, InFlight};
pub use experts::ExpertMlp;
use experts::{ExpertPass, ExpertWeights};
pub use groups::ExpertGroups;
pub use load::{ExpertLoad, LoadCounts};
use megaburn_kernels::flush;
pub use quantile::{QUANTILE_BINS, quantile_biases};
pub use router::Router;
use router::off_graph;

use crate::{Activation, Mlp, PlanBuilder, Recomputable, Sharded, TokenContext};

/// A feed-forward layer of experts: `sum_i weight_i expert_i(x)` over those that the [`Router`] chose for the
/// token, plus the shared expert where there is one.
///
/// # Collective
/// All ranks of [`ExpertGroups::experts`], forward and backward: numbers of tokens (and which experts those have that
/// go once to a rank of several) are told to each other,
/// then rows go to the ranks of their experts and back (all-to-all over `ep`, all-gather and reduce-scatter over
/// `etp`; or as its [`Dispatcher`] says). A rank that has no tokens, or whose experts get none, takes part like any
/// other. Where losses [balance](Balance) the experts, those of [`ExpertGroups::tp_cp`] sum numbers of tokens.
#[derive(Module, Debug)]
pub struct Moe {
    /// Chooses the experts of each token.
    pub router: Router,
    /// All experts by number; none where another rank has it.
    pub experts: Vec<Option<ExpertMlp>>,
    /// An expert of every token.
    pub shared: Option<Mlp>,
    #[module(skip)]
    parts: MoeParts,
}

/// What the layer holds beside its parameters.
#[derive(Clone, Debug)]
struct MoeParts {
    groups: ExpertGroups,
    activation: Activation,
    dispatcher: Dispatcher,
    recompute: bool,
}

/// How experts are used: what [`Moe`] is told beside what they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeOptions {
    /// What shall make tokens go to all experts alike.
    pub balance: LoadBalance,
    /// How many tokens each expert takes; none: all that come.
    pub capacity: Option<Capacity>,
    /// How tokens get to the ranks of their experts.
    pub dispatcher: Dispatcher,
}

impl Default for MoeOptions {
    fn default() -> Self {
        let (balance, capacity) = Default::default();
        Self {
            balance,
            capacity,
            dispatcher: Dispatcher::AllToAll,
        }
    }
}

impl Moe {
    /// Applies the layer.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`, unchanged: tokens of this rank only (with tensor parallelism a stretch of the
    /// sequence)
    pub fn forward(&self, x: impl Into<Recomputable<3>>, context: &TokenContext) -> Tensor<3> {
        let x = x.into().into_tensor();
        let dims = x.dims();
        let routed = self.router.route(x.clone(), context);
        let groups = &self.parts.groups;
        let [seq, batch, d_model] = dims;
        let tokens = x.clone().reshape([seq * batch, d_model]);
        let slots = Assignments {
            experts: routed.experts,
            tokens: off_graph(&tokens),
            num_experts: self.experts.len(),
            padded: routed.padded,
        };
        // Before the host waits to be told how many rows come: the GPU will wait for it then.
        let experts = ExpertWeights::of(self.experts.iter().flatten());
        let dispatch = Dispatch::new(slots, self.parts.dispatcher, groups);
        let sent = dispatch.dispatch(tokens, routed.weights);
        let shared = self.shared.as_ref().map(|shared| shared.forward(x));
        let [rows, weights] = sent.map(InFlight::wait);
        // The host has read how many there are, and the GPU may have nothing else.
        flush(&rows);
        let rows = self.forward_experts(experts, rows, weights.squeeze_dim(1), &dispatch);
        let y = dispatch.combine(rows).reshape(dims);
        match shared {
            Some(shared) => y + shared,
            None => y,
        }
    }

    fn forward_experts(
        &self,
        experts: ExpertWeights,
        rows: Tensor<2>,
        weights: Tensor<1>,
        dispatch: &Dispatch,
    ) -> Tensor<2> {
        let MoeParts {
            activation,
            recompute,
            ..
        } = self.parts;
        let pass = ExpertPass {
            activation,
            recompute,
            rows_per_expert: dispatch.rows_per_expert(),
            // Who gets no gradient back is sent none.
            beside: dispatch.beside().filter(|_| rows.is_tracked()),
        };
        experts::forward(experts, &pass, rows, weights)
    }

    /// Whether backward computes the experts' activation once more instead of keeping its result. Off at
    /// first.
    #[must_use]
    pub fn with_recompute(mut self, recompute: bool) -> Self {
        self.parts.recompute = recompute;
        self.shared = self.shared.map(|shared| shared.with_recompute(recompute));
        self
    }

    /// All at once.
    #[must_use]
    pub fn with_options(self, options: MoeOptions) -> Self {
        let MoeOptions {
            balance,
            capacity,
            dispatcher,
        } = options;
        self.with_balance(balance)
            .with_capacity(capacity)
            .with_dispatcher(dispatcher)
    }

    /// How tokens get to the ranks of their experts: to those only, at first.
    #[must_use]
    pub fn with_dispatcher(mut self, dispatcher: Dispatcher) -> Self {
        self.parts.dispatcher = dispatcher;
        self
    }

    /// What shall make tokens go to all experts alike. Nothing at first.
    #[must_use]
    pub fn with_balance(mut self, balance: LoadBalance) -> Self {
        self.router = self.router.with_balance(balance);
        self
    }

    /// How many tokens each expert takes; none: all that come. In [generation](Self::whole_sequence) it takes
    /// all.
    #[must_use]
    pub fn with_capacity(mut self, capacity: Option<Capacity>) -> Self {
        self.router = self.router.with_capacity(capacity);
        self
    }

    /// The same layer and weights where ranks of the tensor-parallel group have the same tokens, as in
    /// generation: each sends its own.
    pub fn whole_sequence(mut self) -> Self {
        self.router = self.router.whole_sequence();
        self.shared = self.shared.map(Mlp::whole_sequence);
        self
    }
}

impl Sharded for Moe {
    fn shards(&self, plan: &mut PlanBuilder) {
        plan.child("router", &self.router);
        plan.children("experts", &self.experts);
        plan.child("shared", &self.shared);
    }
}
