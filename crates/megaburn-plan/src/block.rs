//! The time of a micro-batch in one block, on one rank.

use megaburn_mesh::Axis;
use megaburn_models::decoder::{BlockOrder, Experts};
use megaburn_parallel::{ContextComm, Dispatcher};

use crate::{
    calibration::{ENQUEUE, ROW_COUNTS},
    machine::ProductKind,
    parts::{Parts, Passes},
    rank::{Rank, Sizes, Tokens},
    traffic::BothPasses,
};

/// A matrix of a block, with the rows that it is multiplied with.
#[derive(Clone, Copy, Debug)]
struct Matrix {
    rows: f64,
    inner: f64,
    columns: f64,
    /// The rows of one product: those of an expert.
    rows_of_product: f64,
    is_of_experts: bool,
}

impl Matrix {
    fn new(rows: f64, inner: f64, columns: f64) -> Self {
        Self {
            rows,
            inner,
            columns,
            rows_of_product: rows,
            is_of_experts: false,
        }
    }
}

impl Rank<'_> {
    /// The passes of a micro-batch through block `index`, which is at `position` of its stage.
    pub(crate) fn block(&self, index: usize, position: usize) -> Passes {
        let matrices = self.matrices(index);
        let is_quantized = self.is_quantized(index);
        let products = |of: &dyn Fn(&Matrix) -> bool| -> f64 {
            let seconds = |matrix: &Matrix| self.seconds(matrix, is_quantized);
            matrices
                .iter()
                .filter(|matrix| of(matrix))
                .map(seconds)
                .sum()
        };
        let all = products(&|_| true);
        let [attention, attention_backward] = self.attention(index);
        let [memory, memory_backward] = self.kernels(index, &matrices, is_quantized);
        let [sent, sent_backward] = self.exposed(index, attention, attention_backward);
        let waits = match self.model.layer_experts(index) {
            Some(_) => ROW_COUNTS,
            None => 0.0,
        };
        let forward = Parts {
            products: all,
            attention,
            memory,
            communication: sent,
            host: waits,
        };
        let mut input = Parts {
            products: all,
            attention: attention_backward,
            memory: memory_backward,
            communication: sent_backward,
            host: 0.0,
        };
        let weight = Parts {
            products: all,
            ..Parts::default()
        };
        let recomputed = self.is_recomputed(position);
        if recomputed {
            let kept = if self.recompute.keep_attention {
                attention
            } else {
                0.0
            };
            input += Parts {
                attention: attention - kept,
                ..forward
            };
        } else {
            input += self.recomputed_modules(index, attention, is_quantized);
        }
        let times = if recomputed { 2.0 } else { 1.0 };
        Passes {
            forward: forward.enqueued_in(ENQUEUE[0]),
            input: input.enqueued_in(times * ENQUEUE[1]),
            weight: weight.enqueued_in(ENQUEUE[2]),
        }
    }

    /// What backward recomputes of a block that is not recomputed as a whole.
    fn recomputed_modules(&self, index: usize, attention: f64, is_quantized: bool) -> Parts {
        let tokens = self.tokens_of(index);
        let element = self.element;
        let stream = tokens.of_stream * self.sizes().hidden * element;
        let mut again = Parts::default();
        if self.recompute.norm {
            again.memory += self.machine.memory(4.0 * stream);
        }
        if self.recompute.core_attention {
            again.attention += attention;
        }
        let ffn = self.model.ffn as f64 / self.layout.tp as f64;
        let up = self.up(ffn);
        if self.recompute.activation || self.recompute.mlp {
            let bytes = tokens.on_rank * (up + ffn) * element;
            again.memory += self.machine.memory(bytes);
        }
        if self.recompute.mlp {
            let matrix = Matrix::new(tokens.on_rank, self.sizes().hidden, up);
            again.products += self.seconds(&matrix, is_quantized);
        }
        again
    }

    fn seconds(&self, matrix: &Matrix, is_quantized: bool) -> f64 {
        let Matrix {
            rows,
            inner,
            columns,
            rows_of_product,
            is_of_experts,
        } = *matrix;
        let in_bf16 = is_of_experts && self.config.precision.experts_in_bf16;
        let kind = match (is_of_experts, is_quantized && !in_bf16) {
            (false, false) => ProductKind::Plain,
            (false, true) => ProductKind::Quantized,
            (true, false) => ProductKind::Grouped,
            (true, true) => ProductKind::QuantizedGrouped,
        };
        let smallest = rows_of_product.min(inner).min(columns).max(1.0);
        self.machine.product([rows, inner, columns], smallest, kind)
    }

    fn matrices(&self, index: usize) -> Vec<Matrix> {
        let tokens = self.tokens_of(index);
        let sizes = self.sizes();
        let mut all = self.attention_matrices(&tokens, &sizes);
        if self.model.attends_to_encoder(index) {
            let encoder = self.tokens(true).on_rank;
            let n = tokens.on_rank;
            all.extend([
                Matrix::new(n, sizes.hidden, sizes.query),
                Matrix::new(encoder, sizes.hidden, 2.0 * sizes.key_value),
                Matrix::new(n, sizes.query, sizes.hidden),
            ]);
        }
        let mlp = |ffn: f64| {
            let n = tokens.on_rank;
            [
                Matrix::new(n, sizes.hidden, self.up(ffn)),
                Matrix::new(n, ffn, sizes.hidden),
            ]
        };
        let tp = self.layout.tp as f64;
        match self.model.layer_experts(index) {
            None => all.extend(mlp(self.model.ffn as f64 / tp)),
            Some(experts) => {
                let rows = self.expert_rows(experts, &tokens);
                let ffn = experts.ffn as f64 / self.layout.etp as f64;
                let own = (experts.num / self.layout.ep).max(1) as f64;
                let grouped = |inner, columns| Matrix {
                    rows_of_product: rows / own,
                    is_of_experts: true,
                    ..Matrix::new(rows, inner, columns)
                };
                all.extend([
                    grouped(sizes.hidden, self.up(ffn)),
                    grouped(ffn, sizes.hidden),
                ]);
                let shared = experts.shared_ffn.map(|ffn| mlp(ffn as f64 / tp));
                all.extend(shared.into_iter().flatten());
            }
        }
        all
    }

    /// The number of weights of a rank in the matrices of block `index`.
    pub(crate) fn weights_of(&self, index: usize) -> f64 {
        let own = match self.model.layer_experts(index) {
            Some(experts) => (experts.num / self.layout.ep).max(1) as f64,
            None => 1.0,
        };
        let elements = |matrix: &Matrix| {
            let copies = if matrix.is_of_experts { own } else { 1.0 };
            copies * matrix.inner * matrix.columns
        };
        self.matrices(index).iter().map(elements).sum()
    }

    fn attention_matrices(&self, tokens: &Tokens, sizes: &Sizes) -> Vec<Matrix> {
        let n = tokens.on_rank;
        let hidden = sizes.hidden;
        let Some(latents) = sizes.latents else {
            return vec![
                Matrix::new(n, hidden, sizes.query + 2.0 * sizes.key_value),
                Matrix::new(n, sizes.query, hidden),
            ];
        };
        let r = tokens.of_stream;
        let mut all = match latents.query {
            Some(latent) => vec![
                Matrix::new(r, hidden, latent),
                Matrix::new(n, latent, sizes.query),
            ],
            None => vec![Matrix::new(n, hidden, sizes.query)],
        };
        all.extend([
            Matrix::new(r, hidden, latents.key_value + latents.rotary),
            Matrix::new(n, latents.key_value, latents.up),
            Matrix::new(n, sizes.values, hidden),
        ]);
        all
    }

    /// The rows of this rank's experts, if all experts have equally many.
    fn expert_rows(&self, experts: &Experts, tokens: &Tokens) -> f64 {
        experts.top_k as f64 * tokens.of_stream * self.layout.etp as f64
    }

    /// Seconds of core attention, forward and backward.
    fn attention(&self, index: usize) -> [f64; 2] {
        let tokens = self.tokens_of(index);
        let sizes = self.sizes();
        let ranks = self.context_ranks() as f64;
        let seq_len = tokens.seq_len;
        let seen = self
            .model
            .layer_window(index)
            .map_or(seq_len, |window| (window as f64).min(seq_len));
        let pairs = match self.model.sees_later(index) {
            true => seq_len * seen,
            false => seen * seq_len - seen * seen / 2.0,
        };
        let of = |pairs: f64, keys: f64| {
            // Queries with keys and probabilities with values; five such products backward.
            let flops = 2.0 * (sizes.query + sizes.values) * pairs * tokens.sequences / ranks;
            [1.0, 2.5].map(|times| self.machine.attention(times * flops, keys, ranks > 1.0))
        };
        let [mut forward, mut backward] = of(pairs, seen);
        if self.model.attends_to_encoder(index) {
            let keys = self.tokens(true).seq_len;
            let crossed = of(keys * seq_len, keys);
            forward += crossed[0];
            backward += crossed[1];
        }
        [forward, backward]
    }

    /// Seconds of the kernels that read and write memory, forward and backward.
    fn kernels(&self, index: usize, matrices: &[Matrix], is_quantized: bool) -> [f64; 2] {
        let tokens = self.tokens_of(index);
        let sizes = self.sizes();
        let n = tokens.on_rank;
        let stream = tokens.of_stream * sizes.hidden;
        let placement = self.model.norm_placement;
        let inputs = match self.model.block_order {
            _ if !placement.has_input_norms() => 0.0,
            BlockOrder::ParallelSharedNorm => 1.0,
            BlockOrder::Serial | BlockOrder::Parallel => 2.0,
        };
        let outputs = if placement.has_output_norms() {
            2.0
        } else {
            0.0
        };
        let crossed = if self.model.attends_to_encoder(index) {
            1.0
        } else {
            0.0
        };
        // With the residual: reads two tensors and writes two, in both passes.
        let norms = (inputs + outputs + crossed) * 4.0 * stream;
        let [mut forward, mut backward] = [norms; 2];
        let keyed = sizes.query + sizes.key_value;
        let turned = if self.model.positions.rotary().is_some() {
            2.0
        } else {
            0.0
        };
        let normed = if self.model.qk_norm.is_some() {
            2.0
        } else {
            0.0
        };
        forward += (turned + normed) * keyed * n;
        // The gradients of queries, keys and values are joined.
        let joined = 2.0 * (keyed + sizes.key_value);
        backward += ((turned + 1.5 * normed) * keyed + joined) * n;
        let ffn = self.model.ffn as f64 / self.layout.tp as f64;
        let mlp = |rows: f64, ffn: f64| {
            [self.up(ffn) + ffn, 2.0 * self.up(ffn) + ffn].map(|of| of * rows)
        };
        let mut activated = [[0.0; 2]; 2];
        match self.model.layer_experts(index) {
            None => activated[0] = mlp(n, ffn),
            Some(experts) => {
                let rows = self.expert_rows(experts, &tokens);
                activated[0] = mlp(rows, experts.ffn as f64 / self.layout.etp as f64);
                if let Some(ffn) = experts.shared_ffn {
                    activated[1] = mlp(n, ffn as f64 / self.layout.tp as f64);
                }
                // Rows are sorted by expert, and summed for their tokens; the router works in f32.
                let moved = 3.0 * rows * sizes.hidden + 3.0 * stream;
                let routed = 6.0 * tokens.of_stream * experts.num as f64;
                forward += moved + routed;
                backward += moved + routed;
            }
        }
        forward += activated[0][0] + activated[1][0];
        backward += activated[0][1] + activated[1][1];
        if self.model.mlp_bias {
            // The gradients of biases are sums of what backward reads anyway, but for those of
            // matrices whose output goes into the residual stream.
            backward += 2.0 * stream;
        }
        let casts = if is_quantized {
            self.casts(matrices)
        } else {
            [0.0; 2]
        };
        [
            self.machine.memory(self.element * forward + casts[0]),
            self.machine.memory(self.element * backward + casts[1]),
        ]
    }

    /// Bytes that the casts to FP8 read and write: each matrix is read and written in both
    /// directions.
    fn casts(&self, matrices: &[Matrix]) -> [f64; 2] {
        let bytes = self.element + 2.0;
        let inputs = |matrix: &Matrix| matrix.rows * matrix.inner + matrix.inner * matrix.columns;
        let outputs = |matrix: &Matrix| matrix.rows * matrix.columns;
        [
            bytes * matrices.iter().map(inputs).sum::<f64>(),
            bytes * matrices.iter().map(outputs).sum::<f64>(),
        ]
    }

    /// Seconds of communication that nothing hides, forward and backward. Attention hides the ring.
    fn exposed(&self, index: usize, attention: f64, attention_backward: f64) -> [f64; 2] {
        let tp = self.links(&[Axis::Tp]).ring();
        let ep = self.links(&[Axis::Ep]).exchange();
        let shared = match self.config.moe.dispatcher {
            Dispatcher::AllGather => self.links(&[Axis::Etp, Axis::Ep]),
            _ => self.links(&[Axis::Etp]),
        };
        let mut cp = self.seconds_over_cp(index);
        if self.context_comm(index) == ContextComm::P2p {
            cp[0] = (cp[0] - attention).max(0.0);
            cp[1] = (cp[1] - attention_backward).max(0.0);
        }
        let others = [
            seconds(self.sent_by_block_over_tp(index), tp),
            seconds(self.exchanged_over_ep(index), ep),
            seconds(self.gathered_for_experts(index), shared.ring()),
        ];
        [0, 1].map(|pass| cp[pass] + others.iter().map(|of| of[pass]).sum::<f64>())
    }

    /// Seconds in which context-parallel ranks exchange keys and values, forward and backward.
    fn seconds_over_cp(&self, index: usize) -> [f64; 2] {
        let cp = self.context_ranks();
        if cp == 1 {
            return [0.0; 2];
        }
        let links = self.links(&[Axis::Cp]);
        match self.context_comm(index) {
            ContextComm::P2p => seconds(self.sent_over_cp(index), links.neighbour()),
            ContextComm::AllGather => seconds(self.sent_over_cp(index), links.ring()),
            ContextComm::A2a => seconds(self.sent_over_cp(index), links.exchange()),
            ContextComm::A2aP2p { low } => {
                let exchanged = self.sent_for_heads(index, low);
                let exchanged = seconds(exchanged, links.part(low).exchange());
                let ring = seconds(self.sent_in_ring(index, cp / low), links.neighbour());
                [exchanged[0] + ring[0], exchanged[1] + ring[1]]
            }
        }
    }
}

/// The seconds that communication takes in each pass.
fn seconds(sent: BothPasses, bandwidth: f64) -> [f64; 2] {
    sent.map(|sent| sent.seconds(bandwidth))
}
