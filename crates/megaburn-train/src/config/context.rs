//! The keys of context parallelism.

use megaburn_mesh::Layout;
use megaburn_models::DecoderConfig;
use megaburn_parallel::ContextComm;
use serde::{Deserialize, Serialize};

use super::{TrainConfig, require::require};
use crate::error::TrainError;

/// How context-parallel ranks exchange keys and values, in one layer or in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum CpComm {
    /// Chosen by [`ContextComm::auto`] from the layout, the sequence length and the heads.
    Auto,
    /// A fixed method.
    Way(ContextComm),
}

impl CpComm {
    /// The method for this layout and model with sequences of `seq_len` tokens.
    pub fn resolved(self, layout: &Layout, model: &DecoderConfig, seq_len: usize) -> ContextComm {
        self.of(layout.cp, seq_len / layout.cp, heads_of_rank(layout, model))
    }

    /// The method for `ranks` ranks with `tokens` tokens of a sequence and `heads` `[query,
    /// key/value]` heads each.
    pub(crate) fn of(self, ranks: usize, tokens: usize, heads: [usize; 2]) -> ContextComm {
        match self {
            Self::Auto => ContextComm::auto(ranks, tokens, heads),
            Self::Way(way) => way,
        }
    }
}

impl From<CpComm> for String {
    fn from(comm: CpComm) -> Self {
        match comm {
            CpComm::Auto => "auto".into(),
            CpComm::Way(way) => way.to_string(),
        }
    }
}

impl TryFrom<String> for CpComm {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        match text.as_str() {
            "auto" => Ok(Self::Auto),
            text => text
                .parse()
                .map(Self::Way)
                .map_err(|why| format!("{why}, or `auto`")),
        }
    }
}

/// The `[query, key/value]` heads of a rank.
fn heads_of_rank(layout: &Layout, model: &DecoderConfig) -> [usize; 2] {
    [model.heads, model.kv_heads].map(|heads| (heads / layout.tp).max(1))
}

impl TrainConfig {
    /// Tokens of a sequence of `data.seq_len`, including the padding for context parallelism.
    pub fn padded_seq_len(&self, layout: &Layout) -> usize {
        self.padded(self.data.seq_len, layout)
    }

    /// Tokens of all sequences of a sample, including the padding for context parallelism.
    pub(crate) fn row_len(&self, layout: &Layout) -> usize {
        let lens = self.data.seq_lens().into_iter();
        lens.map(|seq_len| self.padded(seq_len, layout)).sum()
    }

    /// The length of a sequence of `seq_len` tokens, including the padding for context parallelism.
    pub(crate) fn padded(&self, seq_len: usize, layout: &Layout) -> usize {
        let Layout { cp, tp, sp, .. } = *layout;
        match self.parallel.cp_pad && cp > 1 {
            // Two chunks per cp rank, each of which is split over the tp ranks.
            true if sp => seq_len.next_multiple_of(cp * if tp % 2 == 0 { tp } else { 2 * tp }),
            true => seq_len.next_multiple_of(2 * cp),
            false => seq_len,
        }
    }

    /// The layout by which rows are split: without cp where hybrid context parallelism assigns
    /// documents to ranks.
    pub(crate) fn cutting(&self, layout: &Layout) -> Layout {
        match self.parallel.max_tokens_per_rank {
            Some(_) => Layout { cp: 1, ..*layout },
            None => *layout,
        }
    }

    /// Checks that the data can be split over context-parallel ranks as `layout` says.
    pub(crate) fn check_context(&self, layout: &Layout) -> Result<(), TrainError> {
        let data = &self.data;
        let train = &self.train;
        let cp = layout.cp;
        if self.padded_seq_len(layout) != data.seq_len {
            let rule = "0 if sequences are padded (parallel.cp_pad), or data.seq_len must need \
                       no padding";
            let share = train.attention_dropout;
            require(share == 0.0, "train.attention_dropout", share, rule)?;
        }
        if let Some(tokens) = self.parallel.max_tokens_per_rank {
            let needs = |ok, rule| require(ok, "parallel.max_tokens_per_rank", tokens, rule);
            needs(
                data.documents,
                "absent without data.documents = true, whose documents it distributes over ranks",
            )?;
            needs(
                layout.pp == 1,
                "absent with a pipeline, whose stages need sequences of the same length",
            )?;
            let one = "absent if parallel.cp_comm is set per layer";
            needs(self.parallel.cp_comm.len() == 1, one)?;
        } else if !data.documents || cp == 1 {
            return Ok(());
        }
        for (key, share) in [
            ("train.hidden_dropout", train.hidden_dropout),
            ("train.attention_dropout", train.attention_dropout),
        ] {
            let rule = "0 if documents (data.documents) are sharded over ranks (cp above 1, or \
                       parallel.max_tokens_per_rank)";
            require(share == 0.0, key, share, rule)?;
        }
        if self.parallel.max_tokens_per_rank.is_some() {
            return Ok(());
        }
        let multiple = data.document_multiple;
        let chunks = 2 * cp;
        let rule = format!(
            "a multiple of {chunks}, the chunks that cp {cp} splits a document \
                           into"
        );
        require(
            multiple.is_multiple_of(chunks),
            "data.document_multiple",
            multiple,
            rule,
        )
    }

    /// How keys and values are exchanged: one method for all layers, or one per layer.
    ///
    /// # Errors
    /// A list of another length than the model has layers, or a method that its heads do not allow.
    pub fn context_comms(
        &self,
        layout: &Layout,
        model: &DecoderConfig,
    ) -> Result<Vec<ContextComm>, TrainError> {
        let ways = &self.parallel.cp_comm;
        let rule = format!(
            "one value for all layers, or one for each of the model's {} layers",
            model.layers
        );
        let validate_for = ways.len() == 1 || ways.len() == model.layers;
        require(
            validate_for,
            "parallel.cp_comm",
            format!("a list of {}", ways.len()),
            rule,
        )?;
        let seq_len = self.padded_seq_len(layout);
        let ways: Vec<_> = ways
            .iter()
            .map(|way| way.resolved(layout, model, seq_len))
            .collect();
        if self.parallel.max_tokens_per_rank.is_none() {
            ways.iter()
                .try_for_each(|way| self.check_way(*way, layout.cp, layout, model))?;
        }
        Ok(ways)
    }

    /// How `size` ranks that share a document exchange keys and values, with hybrid context
    /// parallelism.
    pub(crate) fn way_of_documents(
        &self,
        layout: &Layout,
        model: &DecoderConfig,
        size: usize,
    ) -> ContextComm {
        let tokens = self
            .parallel
            .max_tokens_per_rank
            .unwrap_or(self.data.seq_len);
        match self.parallel.cp_comm[0].of(size, tokens, heads_of_rank(layout, model)) {
            // The group is smaller than `low`, so there are no groups to exchange across.
            ContextComm::A2aP2p { low } if size < low => ContextComm::A2a,
            way => way,
        }
    }

    /// Refuses a method of exchange that is impossible for `ranks` ranks with this model's heads.
    pub(super) fn check_way(
        &self,
        way: ContextComm,
        ranks: usize,
        layout: &Layout,
        model: &DecoderConfig,
    ) -> Result<(), TrainError> {
        let [heads, kv_heads] = heads_of_rank(layout, model);
        let rule = match way {
            ContextComm::A2aP2p { low } if !ranks.is_multiple_of(low) => {
                format!("a2aN+p2p with an N that divides {ranks}, the ranks that share a sequence")
            }
            _ => format!(
                "p2p or all_gather, or a2aN+p2p with an N that divides the {heads} query and the {kv_heads} key/value heads of a rank (model.heads and model.kv_heads, over tp {})",
                layout.tp
            ),
        };
        let ok = way.check(ranks, [heads, kv_heads]).is_ok();
        require(ok, "parallel.cp_comm", way, rule)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::config::ConfigLayers;

    fn config(sets: &[&str]) -> TrainConfig {
        let layers = ConfigLayers::new();
        sets.iter()
            .fold(layers, |layers, set| layers.with_set(set).unwrap())
            .load()
            .unwrap()
    }

    #[rstest]
    #[case("cp4", 128)]
    #[case("cp3", 102)]
    #[case("tp2-cp3-sp", 102)]
    #[case("tp4-cp3-sp", 108)]
    #[case("tp3-cp3-sp", 108)]
    #[case("tp1", 97)]
    fn sequences_are_padded_when_that_is_asked_for(#[case] layout: Layout, #[case] padded: usize) {
        let seq_len = if padded == 128 { 128 } else { 97 };
        let set = format!("data.seq_len={seq_len}");
        assert_eq!(
            config(&[&set, "parallel.cp_pad=true"]).padded_seq_len(&layout),
            padded
        );
        assert_eq!(config(&[&set]).padded_seq_len(&layout), seq_len);
    }

    #[rstest]
    #[case(&["data.document_multiple=8"], "`data.document_multiple` is 8: it must be a multiple of 6, the chunks that cp 3 splits")]
    #[case(&["data.document_multiple=24", "data.seq_len=96", "train.hidden_dropout=0.1"], "`train.hidden_dropout` is 0.1: it must be 0 if documents")]
    fn documents_that_cannot_be_shared_are_refused(#[case] sets: &[&str], #[case] message: &str) {
        let sets = [&["data.documents=true"], sets].concat();
        let error = config(&sets)
            .check_context(&"cp3".parse().unwrap())
            .unwrap_err()
            .to_string();
        assert!(error.contains(message), "{error}");
        config(&sets).check_context(&Layout::SINGLE).unwrap();
    }

    #[rstest]
    #[case(
        "cp4",
        "a2a",
        "`parallel.cp_comm` is a2a: it must be p2p or all_gather, or a2aN+p2p with an N that divides the 4 query and the 2 key/value heads of a rank"
    )]
    #[case(
        "tp2-cp2-sp",
        "a2a",
        "the 2 query and the 1 key/value heads of a rank (model.heads and model.kv_heads, over tp 2)"
    )]
    #[case(
        "cp4",
        "a2a3+p2p",
        "`parallel.cp_comm` is a2a3+p2p: it must be a2aN+p2p with an N that divides 4, the ranks"
    )]
    fn heads_that_cannot_be_shared_out_are_refused_with_the_layout(
        #[case] layout: Layout,
        #[case] way: &str,
        #[case] message: &str,
    ) {
        let config = config(&[&format!("parallel.cp_comm={way}")]);
        let error = config.validate_for(&layout).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }

    #[test]
    fn a_way_that_is_none_and_too_many_ways_are_refused() {
        let error = ConfigLayers::new()
            .with_set(r#"parallel.cp_comm=["ring"]"#)
            .unwrap_err();
        let error = error.to_string();
        assert!(error.contains("unknown cp_comm `ring`"), "{error}");
        let config = config(&[r#"parallel.cp_comm=["p2p", "a2a"]"#]);
        let model = config.model.decoder(128, 260);
        let error = config
            .context_comms(&Layout::SINGLE, &model)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`parallel.cp_comm` is a list of 2: it must be one value for all"),
            "{error}"
        );
    }
}
