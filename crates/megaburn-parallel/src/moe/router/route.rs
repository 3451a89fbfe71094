use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData};
use megaburn_autograd::LinearPass;
use megaburn_collective::region::unwrap_collective;
use megaburn_kernels::{RouterGradients, choose_experts, route, route_to, sum_columns};

use super::{Router, RouterPlan, off_graph, read};
use crate::{
    moe::{
        balance::{BalanceChoice, LoadBalance, Tokens, round_robin},
        capacity::CapacityInputs,
        dispatch::DROPPED,
        sinkhorn::sinkhorn_biases,
    },
    tokens::BatchContext,
};

/// The routing of a rank's tokens.
pub(in crate::moe) struct Routed {
    /// The experts of each token, `[tokens, top_k]` in i32, off the autodiff device; [`DROPPED`]
    /// for slots without an expert.
    pub(in crate::moe) experts: Tensor<2, Int>,
    /// Their weights, `[tokens, top_k]` in f32.
    pub(in crate::moe) weights: Tensor<2>,
    /// Rows of every expert with padding; `None` means the rows that arrive.
    pub(in crate::moe) padded: Option<usize>,
}

impl Router {
    /// Chooses the experts of each token and their weights. On a GPU the host does not wait for any
    /// of it, except where the host itself computes: if experts are chosen by [Sinkhorn's
    /// algorithm](BalanceChoice::Sinkhorn), if margins are counted, if tokens may be dropped, or
    /// with more than 512 experts.
    ///
    /// # Shapes
    /// `x`: `[seq, batch, d_model]`
    pub(in crate::moe) fn route(&self, x: Tensor<3>, context: &BatchContext) -> Routed {
        let RouterPlan {
            options, groups, ..
        } = &self.how;
        let [seq, batch, _] = x.dims();
        let counted = self.counted(context, seq * batch);
        let logits = self.logits(x);
        let plain = off_graph(&logits);
        let tokens = Tokens {
            seq,
            batch,
            group: &groups.tp_cp,
            counted: counted.map(|counted| as_column(counted, &plain)),
        };
        let given = self.given(&plain, counted, context);
        let mut seen = None;
        // In a recompute, these tokens were already counted.
        let loss_mask_values = context.loss_factor.is_some() && !LinearPass::is_backward();
        let is_seen = loss_mask_values || self.how.balance.is_some();
        let extra = |routed: &megaburn_kernels::Routed| {
            let Some(factor) = context.loss_factor.filter(|_| is_seen) else {
                return RouterGradients::default();
            };
            let (counts, sums, gradients) = self.balanced(plain, routed, &tokens, factor);
            seen = Some((counts, sums));
            gradients
        };
        let routed = match given {
            Some(experts) => route_to(logits, experts, options, extra),
            None => route(
                logits,
                self.bias.as_ref().map(|bias| bias.val()),
                options,
                extra,
            ),
        };
        let megaburn_kernels::Routed {
            weights,
            experts,
            scores,
        } = routed;
        let LoadBalance {
            choice,
            quantile_counts,
            ..
        } = self.how.balance;
        if loss_mask_values && quantile_counts && choice == BalanceChoice::Scores {
            self.add_quantile_counts(scores, counted);
        }
        let experts = match &tokens.counted {
            Some(counted) => {
                let is_padding = counted.clone().equal_elem(0.0).expand(experts.dims());
                experts.mask_fill(is_padding, DROPPED)
            }
            None => experts,
        };
        let (experts, dropped, padded) = self.drop_from(experts, &weights, [seq, batch], context);
        if let Some((counts, sums)) = seen.filter(|_| loss_mask_values) {
            let all = sum_columns(counts).flatten::<1>(0, 1).int();
            self.load().add(all.cast(DType::I64), dropped, sums);
        }
        Routed {
            experts,
            weights,
            padded,
        }
    }

    /// The experts, where the kernel does not choose them.
    fn given(
        &self,
        logits: &Tensor<2>,
        counted: Option<&[bool]>,
        context: &BatchContext,
    ) -> Option<Tensor<2, Int>> {
        let RouterPlan {
            num_experts,
            options,
            groups,
            balance,
            ..
        } = &self.how;
        let experts: Vec<i32> = match balance.choice {
            BalanceChoice::RoundRobin => {
                round_robin(logits.dims()[0] * options.top_k, *num_experts)
            }
            BalanceChoice::Sinkhorn if context.loss_factor.is_some() => {
                let logits = read(logits.clone().flatten(0, 1));
                let biases = sinkhorn_biases(&logits, *num_experts, counted, &groups.tp_cp);
                let biases = unwrap_collective(biases);
                let chosen = choose_experts(&logits, *num_experts, Some(&biases), options);
                chosen.into_iter().map(|expert| expert as i32).collect()
            }
            BalanceChoice::Scores | BalanceChoice::Sinkhorn => return None,
        };
        Some(as_slots(experts, options.top_k, logits))
    }

    /// The number of tokens that each sequence sends to each expert, and the sums and gradients of
    /// the balancing losses.
    fn balanced(
        &self,
        logits: Tensor<2>,
        routed: &megaburn_kernels::Routed,
        tokens: &Tokens<'_>,
        factor: f64,
    ) -> (Tensor<2>, Option<Tensor<1>>, RouterGradients) {
        let RouterPlan {
            options, balance, ..
        } = &self.how;
        let counts = tokens.sent(&routed.experts, &routed.scores);
        if !balance.is_some() {
            return (counts, None, RouterGradients::default());
        }
        let scores = (routed.scores.clone(), options.scores);
        let found = balance.gradients(logits, scores, counts.clone(), tokens, self.load(), factor);
        (counts, Some(found.sums), found.gradients)
    }

    fn add_quantile_counts(&self, scores: Tensor<2>, counted: Option<&[bool]>) {
        let RouterPlan {
            num_experts,
            options,
            ..
        } = &self.how;
        let Some(biases) = self.biases() else { return };
        let scores = read(scores.flatten(0, 1));
        let rows = scores.chunks_exact(*num_experts).enumerate();
        let loss_mask_values = |token: usize| counted.is_none_or(|all| all[token]);
        let rows = rows
            .filter(|(token, _)| loss_mask_values(*token))
            .map(|(_, row)| row);
        self.load()
            .add_quantile_counts(rows, &biases, options.top_k);
    }

    /// Drops assignments above the experts' capacity. Returns the experts, the number of dropped
    /// slots, and the rows that every expert is padded to.
    fn drop_from(
        &self,
        experts: Tensor<2, Int>,
        weights: &Tensor<2>,
        [seq, batch]: [usize; 2],
        context: &BatchContext,
    ) -> (Tensor<2, Int>, u64, Option<usize>) {
        let RouterPlan {
            num_experts,
            options,
            groups,
            capacity,
            ..
        } = &self.how;
        let Some(capacity) = capacity else {
            return (experts, 0, None);
        };
        let documents = context.documents.as_ref();
        let top_k = options.top_k;
        let num_experts = *num_experts;
        let slots = CapacityInputs {
            seq,
            batch,
            top_k,
            num_experts,
            groups,
            documents,
        };
        let weights = off_graph(weights);
        let device = weights.device();
        let mut chosen: Vec<i32> = experts.into_data().iter().collect();
        let of_slots = read(weights.clone().flatten(0, 1));
        let dropped = capacity.drop_from(&mut chosen, &of_slots, &slots, &device);
        let dropped = unwrap_collective(dropped);
        let padded = capacity.pad.then(|| capacity.rows(&slots));
        (as_slots(chosen, top_k, &weights), dropped, padded)
    }

    /// Which of this rank's tokens count; the context has the tokens of the full tensor-parallel
    /// group. `None` means all count.
    fn counted<'a>(&self, context: &'a BatchContext, tokens: usize) -> Option<&'a [bool]> {
        let all = context.counted.as_deref()?;
        let start = if all.len() == tokens {
            0
        } else {
            self.how.groups.tp.rank() * tokens
        };
        Some(&all[start..start + tokens])
    }
}

impl Tokens<'_> {
    /// The number of counted tokens that each sequence sends to each expert.
    ///
    /// # Shapes
    /// `experts`: `[seq * batch, top_k]`, `scores`: `[seq * batch, e]`, result `[batch, e]`
    fn sent(&self, experts: &Tensor<2, Int>, scores: &Tensor<2>) -> Tensor<2> {
        let Self { seq, batch, .. } = self;
        let [rows, num_experts] = scores.dims();
        let on = (&scores.device(), DType::F32);
        if rows == 0 {
            return Tensor::zeros([*batch, num_experts], on);
        }
        let ones = match &self.counted {
            Some(counted) => counted.clone().expand(experts.dims()),
            None => Tensor::ones(experts.dims(), on),
        };
        let none = Tensor::<2>::zeros([rows, num_experts], on);
        let sent = none.scatter(1, experts.clone(), ones, IndexingUpdateOp::Add);
        let sent = sent.reshape([*seq, batch * num_experts]);
        sum_columns(sent).reshape([*batch, num_experts])
    }
}

fn as_column(counted: &[bool], like: &Tensor<2>) -> Tensor<2> {
    let values: Vec<f32> = counted
        .iter()
        .map(|&loss_mask_values| f32::from(loss_mask_values))
        .collect();
    Tensor::from_data(
        TensorData::new(values, [counted.len(), 1]),
        (&like.device(), DType::F32),
    )
}

fn as_slots(experts: Vec<i32>, top_k: usize, like: &Tensor<2>) -> Tensor<2, Int> {
    let shape = [experts.len() / top_k, top_k];
    Tensor::from_data(
        TensorData::new(experts, shape),
        (&like.device(), DType::I32),
    )
}
