//! Checks of hybrid context parallelism (`parallel.max_tokens_per_rank`).

use megaburn_mesh::Layout;
use megaburn_models::DecoderConfig;
use megaburn_parallel::HybridContextParallel;

use super::{TrainConfig, require::require};
use crate::error::TrainError;

impl TrainConfig {
    /// How documents are assigned to the data- and context-parallel ranks of `layout`; `None`
    /// without `parallel.max_tokens_per_rank`.
    pub(crate) fn hybrid_context(
        &self,
        layout: &Layout,
        model: &DecoderConfig,
    ) -> Option<HybridContextParallel> {
        // FLOPs of the full model: for one token, and for each query-key pair.
        let flops = |seq_len| model.flop_shape().training(1, seq_len);
        let per_pair = flops(2) - 2.0 * flops(1);
        self.parallel
            .max_tokens_per_rank
            .map(|max_tokens| HybridContextParallel {
                num_ranks: layout.dp * layout.cp,
                max_tokens,
                multiple: if layout.sp { layout.tp } else { 1 },
                per_token: flops(1) - per_pair,
                per_pair,
            })
    }

    /// Refuses ranks that cannot hold the longest document, or that cannot exchange keys and
    /// values.
    pub(super) fn check_documents(
        &self,
        layout: &Layout,
        model: &DecoderConfig,
    ) -> Result<(), TrainError> {
        let Some(hybrid_context) = self.hybrid_context(layout, model) else {
            return Ok(());
        };
        let len = self.data.seq_len;
        let most = hybrid_context.max_tokens;
        let ranks = 1usize << hybrid_context.num_ranks.ilog2();
        let padded = hybrid_context.padded(len, ranks);
        let least = padded.div_ceil(ranks);
        let rule = format!(
            "at least {least}, or there must be more ranks: a document may have data.seq_len \
            {len} tokens, which are padded to {padded} for {ranks} ranks (a multiple of two \
            chunks per rank, and of tp with sp)"
        );
        let is_held = hybrid_context.needed(len).is_ok();
        require(is_held, "parallel.max_tokens_per_rank", most, rule)?;
        let sizes = (0..)
            .map(|power| 1usize << power)
            .take_while(|size| *size <= ranks);
        sizes.into_iter().try_for_each(|size| {
            let way = self.way_of_documents(layout, model, size);
            self.check_way(way, size, layout, model)
        })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::config::ConfigLayers;

    #[rstest]
    #[case(
        "tp4-cp2-sp",
        &["data.seq_len=24", "data.document_multiple=8", "parallel.max_tokens_per_rank=14"],
        "`parallel.max_tokens_per_rank` is 14: it must be at least 16, or there must be more ranks: a \
         document may have data.seq_len 24 tokens, which are padded to 32 for 2 ranks"
    )]
    #[case("tp4-cp2-sp", &["data.seq_len=24", "data.document_multiple=8", "parallel.max_tokens_per_rank=16"], "")]
    #[case("dp3", &["data.seq_len=32", "parallel.max_tokens_per_rank=15"], "must be at least 16")]
    #[case(
        "cp4",
        &["model.kv_heads=2", "parallel.max_tokens_per_rank=64", "parallel.cp_comm=a2a"],
        "`parallel.cp_comm` is a2a: it must be p2p or all_gather, or a2aN+p2p"
    )]
    fn documents_that_ranks_cannot_hold_are_refused_at_once(
        #[case] layout: &str,
        #[case] sets: &[&str],
        #[case] message: &str,
    ) {
        let sets = [
            &[
                "data.documents=true",
                "train.global_batch=24",
                "model.kv_heads=4",
            ],
            sets,
        ];
        let layers = ConfigLayers::new().with_layout(layout).unwrap();
        let layers = sets
            .concat()
            .iter()
            .try_fold(layers, |layers, set| layers.with_set(set));
        let found = layers.unwrap().load().unwrap().layout(None);
        let found = found.map_or_else(|error| error.to_string(), |_| String::new());
        assert_eq!(found.is_empty(), message.is_empty(), "{found}");
        assert!(found.contains(message), "{found}");
    }
}
