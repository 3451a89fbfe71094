use std::{fmt, str::FromStr};

use crate::error::ParallelError;

/// How ranks that share a sequence exchange keys and values.
///
/// Source: Megatron-LM `--cp-comm-type`; Liu et al. (2023), <https://arxiv.org/abs/2310.01889>, for
/// `P2p`; Grattafiori et al. (2024), "The Llama 3 Herd of Models", section 3.3.2, for `AllGather`;
/// Jacobs et al. (2023), "DeepSpeed Ulysses", <https://arxiv.org/abs/2309.14509>, for `A2a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContextComm {
    /// Keys and values are passed around the ranks while each computes attention to the ones it
    /// currently has (ring attention). Sends `2 hkv d` numbers per token `ranks - 1` times, which
    /// long sequences hide.
    P2p,
    /// All keys and values are gathered on all ranks before attention. Sends as much as `P2p`, with
    /// nothing to hide it, and holds all of it. Attention then takes at most four calls, whatever
    /// the number of ranks.
    AllGather,
    /// Heads are exchanged for sequence: each rank attends with its share of the heads to full
    /// sequences (Ulysses). Sends `(2 hq + 2 hkv) d` numbers per token, less the rank's own share,
    /// with nothing to hide it. The ranks must divide both head counts.
    A2a,
    /// Combines both: heads are exchanged among `low` neighbours, and keys and values are passed
    /// around across these groups. Use it for heads inside a host and the ring between hosts.
    A2aP2p {
        /// Number of ranks in each group of neighbours.
        low: usize,
    },
}

/// The smallest product of tokens per rank and query heads per key/value head at which a ring hides
/// its transfers. A step of the ring computes `2 s^2 hq d` FLOPs (half of the pairs, two products)
/// and sends `4 s hkv d` bytes in bf16: at 500 TFLOP/s and 250 GB/s between neighbours, both take
/// equally long where `s hq / hkv` is 4000. Not yet measured.
const HIDDEN_FROM: usize = 4096;

impl ContextComm {
    /// Resolves `auto`:
    ///
    /// - [`P2p`](Self::P2p) where a rank's tokens times `hq / hkv` are 4096 or more, so that its
    ///   transfers are hidden;
    /// - else [`A2a`](Self::A2a) where `ranks` divide the heads;
    /// - else `A2aP2p` with the most ranks that do;
    /// - [`AllGather`](Self::AllGather) where no number of ranks above 1 does.
    ///
    /// `tokens` are the tokens of a sequence on each rank, `heads` a rank's query and key/value
    /// heads.
    pub fn auto(ranks: usize, tokens: usize, [heads, kv_heads]: [usize; 2]) -> Self {
        if tokens * heads / kv_heads.max(1) >= HIDDEN_FROM {
            return Self::P2p;
        }
        let divides = |low: &usize| {
            [ranks, heads, kv_heads]
                .iter()
                .all(|count| count.is_multiple_of(*low))
        };
        match (1..=ranks).rev().find(divides) {
            Some(low) if low == ranks => Self::A2a,
            None | Some(1) => Self::AllGather,
            Some(low) => Self::A2aP2p { low },
        }
    }
}

impl ContextComm {
    /// Over how many of `ranks` the heads are split.
    pub(super) fn low(self, ranks: usize) -> usize {
        match self {
            // A single rank holds full sequences and exchanges nothing.
            _ if ranks == 1 => 1,
            Self::P2p | Self::AllGather => 1,
            Self::A2a => ranks,
            Self::A2aP2p { low } => low,
        }
    }

    /// Checks that `ranks` ranks, each with these query and key/value heads, can use this exchange.
    ///
    /// # Errors
    /// The group size of a hierarchy does not divide the ranks, or the ranks over which heads are
    /// split do not divide the heads.
    pub fn check(self, ranks: usize, heads: [usize; 2]) -> Result<(), ParallelError> {
        let low = self.low(ranks);
        let refuse = |why| {
            let layer = "ContextParallel";
            let name = self.to_string();
            Err(ParallelError::Config { layer, name, why })
        };
        if low == 0 || !ranks.is_multiple_of(low) {
            return refuse(format!(
                "{ranks} ranks are not divisible into groups of {low}, over which heads are \
                sharded"
            ));
        }
        if heads.iter().all(|heads| heads.is_multiple_of(low)) {
            return Ok(());
        }
        let [heads, kv_heads] = heads;
        refuse(format!(
            "the {heads} query and {kv_heads} key/value heads of a rank cannot be sharded over \
            {low} ranks: choose `p2p`, or fewer ranks that divide both"
        ))
    }
}

impl fmt::Display for ContextComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::P2p => f.write_str("p2p"),
            Self::AllGather => f.write_str("all_gather"),
            Self::A2a => f.write_str("a2a"),
            Self::A2aP2p { low } => write!(f, "a2a{low}+p2p"),
        }
    }
}

impl FromStr for ContextComm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let low = text
            .strip_prefix("a2a")
            .and_then(|text| text.strip_suffix("+p2p"));
        match (text, low.and_then(|low| low.parse().ok())) {
            ("p2p", _) => Ok(Self::P2p),
            ("all_gather", _) => Ok(Self::AllGather),
            ("a2a", _) => Ok(Self::A2a),
            (_, Some(low)) if low > 0 => Ok(Self::A2aP2p { low }),
            _ => Err(format!(
                "unknown cp_comm `{text}`: expected `p2p`, `all_gather`, `a2a`, or `a2aN+p2p` \
                with N ranks over which heads are sharded (like `a2a2+p2p`)"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(8, 1024, [32, 8], ContextComm::P2p)]
    #[case(8, 1023, [32, 8], ContextComm::A2a)]
    #[case(8, 512, [8, 2], ContextComm::A2aP2p { low: 2 })]
    #[case(6, 512, [9, 9], ContextComm::A2aP2p { low: 3 })]
    #[case(2, 512, [4, 1], ContextComm::AllGather)]
    #[case(4, 512, [8, 8], ContextComm::A2a)]
    fn auto_is_what_it_says(
        #[case] ranks: usize,
        #[case] tokens: usize,
        #[case] heads: [usize; 2],
        #[case] expected: ContextComm,
    ) {
        assert_eq!(ContextComm::auto(ranks, tokens, heads), expected);
    }

    #[test]
    fn ways_are_read_as_they_are_printed() {
        let ways = [
            ContextComm::P2p,
            ContextComm::AllGather,
            ContextComm::A2a,
            ContextComm::A2aP2p { low: 4 },
        ];
        for way in ways {
            assert_eq!(way.to_string().parse(), Ok(way));
        }
        for text in ["", "ring", "a2a0+p2p", "a2a+p2p", "a2a-1+p2p"] {
            let error = text.parse::<ContextComm>().unwrap_err();
            assert!(
                error.starts_with(&format!("unknown cp_comm `{text}`")),
                "{error}"
            );
        }
    }
}
