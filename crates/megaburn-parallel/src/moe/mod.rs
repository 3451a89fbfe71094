//! Mixture of experts: a router sends each token to some of many feed-forward networks, which are
//! distributed over ranks.
//!
//! Source: Shazeer et al. (2017), <https://arxiv.org/abs/1701.06538>; Fedus et al. (2021),
//! <https://arxiv.org/abs/2101.03961>; DeepSeek-AI (2024), <https://arxiv.org/abs/2412.19437>;
//! Megatron-LM `megatron/core/transformer/moe/moe_layer.py`.

mod balance;
mod capacity;
mod config;
mod dispatch;
mod expert_biases;
mod experts;
mod groups;
mod load;
mod quantile;
mod router;
mod shared_gate;
mod sinkhorn;

pub use balance::{BalanceChoice, LoadBalance};
use burn::{module::Module, tensor::Tensor};
pub use capacity::{Capacity, CapacityScope, DropPolicy};
pub use config::MoeConfig;
pub use dispatch::Dispatcher;
use dispatch::{Assignments, Dispatch, InFlight};
use expert_biases::ExpertBiases;
pub use experts::ExpertMlp;
use experts::{ExpertPass, ExpertWeights, token_reduction};
pub use groups::ExpertGroups;
pub use load::{ExpertLoad, LoadCounts};
use megaburn_kernels::{GroupedGemmChoice, flush};
pub use quantile::{QUANTILE_BINS, quantile_biases};
pub use router::Router;
use router::off_graph;
pub use shared_gate::SharedGate;

use crate::{
    linear::PrecisionScope,
    mlp::{Activation, Mlp},
    recomputable::Recomputable,
    shards::Sharded,
    tokens::BatchContext,
};

/// A mixture-of-experts layer: `sum_i weight_i expert_i(x)` over the experts that the [`Router`]
/// chose for the token, plus the shared expert if there is one, times its
/// [gate](SharedGate) if it has one.
///
/// # Collective
/// All ranks of [`ExpertGroups::experts`] call it, forward and backward. They first exchange row
/// counts, and for tokens that are sent once to several experts of a rank also the experts' ids.
/// Then rows are dispatched to the ranks of their experts and combined again: all-to-all over `ep`,
/// all-gather and reduce-scatter over `etp`, or as the [`Dispatcher`] says. A rank without tokens,
/// or whose experts get none, takes part like any other. With a [load-balancing](LoadBalance) loss
/// the ranks of [`ExpertGroups::tp_cp`] also sum token counts. If experts are
/// [quantised](MoeConfig::expert_precision) with one scale per matrix, each pass reduces the
/// largest magnitudes of all experts' matrices, a number for each: over `tp_cp` if it is larger
/// than `experts`, else over `etp`.
#[derive(Module, Sharded, Debug)]
pub struct Moe {
    /// Chooses the experts of each token.
    pub router: Router,
    /// All experts by index; `None` where another rank has the expert.
    pub experts: Vec<Option<ExpertMlp>>,
    /// The shared expert, which every token uses.
    pub shared: Option<Mlp>,
    /// The gate of the shared expert, if it has one.
    pub shared_gate: Option<SharedGate>,
    #[module(skip)]
    parts: MoeParts,
}

/// The parts of the layer that are not parameters.
#[derive(Clone, Debug)]
struct MoeParts {
    groups: ExpertGroups,
    activation: Activation,
    dispatcher: Dispatcher,
    grouped_gemm: GroupedGemmChoice,
    recompute: bool,
}

/// How the experts are used, independent of their parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeOptions {
    /// How the load of the experts is balanced; by default not at all.
    pub balance: LoadBalance,
    /// The capacity of each expert; `None` takes all tokens. In
    /// [generation](Moe::whole_sequence) all tokens are taken.
    pub capacity: Option<Capacity>,
    /// How tokens get to the ranks of their experts; [`Dispatcher::AllToAll`] by default.
    pub dispatcher: Dispatcher,
    /// How the experts' products are computed on a GPU; all ranks must choose the same.
    pub grouped_gemm: GroupedGemmChoice,
}

impl Default for MoeOptions {
    fn default() -> Self {
        let (balance, capacity) = Default::default();
        Self {
            balance,
            capacity,
            dispatcher: Dispatcher::AllToAll,
            grouped_gemm: GroupedGemmChoice::Auto,
        }
    }
}

impl Moe {
    /// Applies the layer.
    ///
    /// # Shapes
    /// `[seq, batch, d_model]`, unchanged: the tokens of this rank only (with tensor parallelism,
    /// its shard of the sequence)
    pub fn forward(&self, x: impl Into<Recomputable<3>>, context: &BatchContext) -> Tensor<3> {
        let x = x.into().into_tensor();
        let dims = x.dims();
        let routed = self.router.route(x.clone(), context);
        let groups = &self.parts.groups;
        let [seq, batch, d_model] = dims;
        let tokens = x.clone().reshape([seq * batch, d_model]);
        let assignments = Assignments {
            experts: routed.experts,
            tokens: off_graph(&tokens),
            num_experts: self.experts.len(),
            padded: routed.padded,
        };
        // Collect the experts' matrices before the host blocks on the row counts: once it has them,
        // the GPU is idle and waits for the host.
        let experts = ExpertWeights::of(self.experts.iter().flatten());
        let matrices = self.experts.iter().flatten();
        let matrices = matrices.map(|expert| [&expert.up, &expert.down]);
        let biases = ExpertBiases::of(matrices, &groups.etp);
        let dispatch = Dispatch::new(assignments, self.parts.dispatcher, groups);
        let sent = dispatch.dispatch(tokens, routed.weights);
        let shared = self.shared.as_ref().map(|shared| {
            let y = shared.forward(x.clone());
            match &self.shared_gate {
                Some(gate) => y * gate.forward(x),
                None => y,
            }
        });
        let [rows, weights] = sent.map(InFlight::wait);
        // The host has just read the row counts, so the GPU may be idle: submit now instead of
        // batching.
        flush(&rows);
        let weights = weights.squeeze_dim(1);
        let rows = self.forward_experts((experts, biases.as_ref()), rows, weights, &dispatch);
        let y = dispatch.combine(rows).reshape(dims);
        let has_rows = dispatch.rows_per_expert().iter().any(|rows| *rows > 0);
        let y = match biases {
            Some(biases) if !has_rows => biases.joined_without_rows(y),
            _ => y,
        };
        match shared {
            Some(shared) => y + shared,
            None => y,
        }
    }

    fn forward_experts(
        &self,
        (experts, biases): (ExpertWeights, Option<&ExpertBiases>),
        rows: Tensor<2>,
        weights: Tensor<1>,
        dispatch: &Dispatch,
    ) -> Tensor<2> {
        let MoeParts {
            activation,
            grouped_gemm,
            recompute,
            ..
        } = self.parts;
        let pass = ExpertPass {
            activation,
            grouped_gemm,
            recompute,
            rows_per_expert: dispatch.rows_per_expert(),
            biases,
            // Without a gradient for the rows, backward sends nothing that could overlap.
            overlapped_wgrads: dispatch.overlapped_wgrads().filter(|_| rows.is_tracked()),
        };
        experts::forward(experts, &pass, rows, weights)
    }

    /// As [`ParallelLinear::in_scope`](crate::ParallelLinear::in_scope), for all experts.
    pub fn in_scope(mut self, scope: &PrecisionScope) -> Self {
        let num_experts = self.experts.len();
        let of_tokens = token_reduction(&scope.tokens, &self.parts.groups, num_experts);
        let expert = |expert: ExpertMlp| expert.in_scope(scope, of_tokens.clone());
        let experts = self.experts.into_iter();
        self.experts = experts.map(|own| own.map(expert)).collect();
        self.shared = self.shared.map(|shared| shared.in_scope(scope));
        self
    }

    /// Returns the layer with the same weights for generation, where the ranks of the
    /// tensor-parallel group have the same tokens and each sends its own copy.
    pub fn whole_sequence(mut self) -> Self {
        self.router = self.router.whole_sequence();
        let experts = self.experts.into_iter();
        self.experts = experts
            .map(|own| own.map(ExpertMlp::whole_sequence))
            .collect();
        self.shared = self.shared.map(Mlp::whole_sequence);
        self.shared_gate = self.shared_gate.map(SharedGate::whole_sequence);
        self
    }
}
