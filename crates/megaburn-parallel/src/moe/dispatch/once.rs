use std::sync::{Mutex, PoisonError};

use burn::tensor::{Device, Float, Tensor};
use megaburn_collective::{
    CollectiveError,
    tensors::{self, Pending},
};
use megaburn_kernels::ranks_of_experts;

use super::{
    Of, Slots, To, Way,
    arranged::Arranged,
    plan::Order,
    rows::{columns, told},
    sorted::{Sorted, Unread},
};
use crate::moe::ExpertGroups;

/// Each token goes once to each rank that has some of its experts (all-to-all over `ep`), which gives it to those,
/// and one sum of what they made of it comes back.
///
/// Source: DeepSeek-AI, DeepEP (<https://github.com/deepseek-ai/DeepEP>); Megatron-LM
/// `--moe-token-dispatcher-type flex`.
#[derive(Debug)]
pub(super) struct Once {
    /// Tokens by the ranks that they go to.
    sent: Sorted,
    /// Those that came, by the experts of this rank.
    taken: Sorted,
    rows_of_experts: Vec<usize>,
    /// Where there is padding.
    arranged: Option<Arranged>,
    /// Tokens that go to each rank, and that come from each.
    send: Vec<usize>,
    recv: Vec<usize>,
    top_k: usize,
    /// What tokens send, until they do.
    ahead: Mutex<Option<Tensor<2>>>,
    groups: ExpertGroups,
}

impl Once {
    /// Whether a token whose experts anybody has goes to three quarters as many ranks at most as it has experts:
    /// else it is not worth putting its copies where they are read. Experts that ranks share are read by several.
    pub(super) fn pays(top_k: usize, groups: &ExpertGroups) -> bool {
        let (ranks, slots) = (groups.ep.size() as f64, top_k as f64);
        let copies = ranks * (1.0 - (1.0 - 1.0 / ranks).powf(slots));
        groups.ep.size() > 1 && groups.etp.size() == 1 && copies <= 0.75 * slots
    }

    /// # Collective
    /// All ranks of `groups.ep`, which tell each other how many tokens and rows go where, then their experts.
    pub(super) fn new(
        slots: Slots,
        groups: &ExpertGroups,
        device: &Device,
    ) -> Result<Self, CollectiveError> {
        let (ranks, own) = (groups.ep.size(), groups.own(slots.num_experts));
        let [_, top_k] = slots.experts.dims();
        let of_experts = Unread::new(slots.experts.clone(), slots.num_experts);
        let sent = Unread::new(ranks_of_experts(slots.experts.clone(), own.len()), ranks);
        let counts = Tensor::cat(vec![sent.counts(), of_experts.counts()], 0);
        let ahead = || sent.ahead(slots.tokens, top_k.min(ranks));
        let (counts, ahead) = told(counts, &groups.ep, ahead)?;
        let of_ranks: Vec<(&[usize], &[usize])> = counts
            .chunks(ranks + slots.num_experts)
            .map(|of_rank| of_rank.split_at(ranks))
            .collect();
        let send = of_ranks[groups.ep.rank()].0.to_vec();
        let recv: Vec<usize> =
            of_ranks.iter().map(|(tokens, _)| tokens[groups.ep.rank()]).collect();
        let rows = own.clone().map(|expert| of_ranks.iter().map(|(_, rows)| rows[expert]).sum());
        let rows: Vec<usize> = rows.collect();
        let sent = sent.with_rows(send.iter().sum());
        let came = tensors::all_to_all(sent.numbers(slots.experts), &send, &recv, &groups.ep)?;
        // Numbers of others' experts are none of this rank's.
        let came = if came.dims()[0] == 0 { came } else { came - own.start as i32 };
        let taken = Unread::new(came, own.len()).with_rows(rows.iter().sum());
        let order = Order::as_they_are(rows);
        let order = match slots.padded {
            Some(rows) => order.padded(rows),
            None => order,
        };
        Ok(Self {
            sent,
            taken,
            arranged: Arranged::new(&order, device),
            rows_of_experts: order.rows,
            send,
            recv,
            top_k,
            ahead: Mutex::new(Some(ahead)),
            groups: groups.clone(),
        })
    }

    fn take_ahead(&self, of: Of) -> Option<Tensor<2>> {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        ahead.take_if(|_| of == Of::Tokens)
    }

    /// A row a token, of what has one or a row a slot.
    fn by_token(&self, x: Tensor<2>, of: Of) -> Tensor<2> {
        match of {
            Of::Tokens => x,
            Of::Slots => columns(x, self.top_k),
        }
    }
}

impl Way for Once {
    fn rows_of_experts(&self) -> &[usize] {
        &self.rows_of_experts
    }

    fn sends(&self) -> bool {
        true
    }

    fn start(&self, x: Tensor<2>, of: Of, to: To) -> Result<Pending<2, Float>, CollectiveError> {
        let Self { sent, taken, arranged, send, recv, groups, .. } = self;
        if to == To::Experts {
            let rows = match self.take_ahead(of) {
                Some(ahead) => sent.of_ahead(ahead),
                None => sent.there(self.by_token(x, of), Of::Tokens),
            };
            return tensors::start_all_to_all(rows, send, recv, &groups.ep);
        }
        let rows = match arranged {
            Some(arranged) => arranged.back(x),
            None => x,
        };
        let rows = self.by_token(taken.back(rows, of), of);
        tensors::start_all_to_all(rows, recv, send, &groups.ep)
    }

    fn finish(&self, came: Tensor<2>, of: Of, to: To) -> Result<Tensor<2>, CollectiveError> {
        let by_slot = |x: Tensor<2>| match of {
            Of::Tokens => x,
            Of::Slots => columns(x, 1),
        };
        if to == To::Tokens {
            return Ok(by_slot(self.sent.back(came, Of::Tokens)));
        }
        let rows = self.taken.there(by_slot(came), of);
        Ok(match &self.arranged {
            Some(arranged) => arranged.there(rows),
            None => rows,
        })
    }
}
