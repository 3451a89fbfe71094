use std::{fmt, str::FromStr};

/// How ranks that share a sequence exchange keys and values (Megatron's `--cp-comm-type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ContextComm {
    /// Keys and values go round the ranks while attention to those that are there is computed (ring
    /// attention). Sends `2 hkv d` numbers a token `ranks - 1` times, hidden where sequences are long.
    P2p,
    /// All keys and values to all ranks, before attention. As much is sent, hidden by nothing, and
    /// held; but attention is two calls.
    AllGather,
    /// Heads for sequence: each rank attends with its share of the heads to whole sequences
    /// (Ulysses). Sends `(2 hq + 2 hkv) d / ranks` numbers a token, hidden by nothing; ranks must divide both
    /// counts of heads.
    A2a,
    /// Heads are shared over neighbours, `low` at a time, keys and values go round across these groups:
    /// inside a host and between hosts.
    A2aP2p {
        /// Ranks of each such group.
        low: usize,
    },
}

/// Tokens of a rank, times query heads over key/value heads, from which on a ring's transfers take less
/// time than the attention that they run beside: `2 s hq / (hkv F)` seconds of it, at `F` FLOP/s, a
/// byte's `1 / W`, for attention at 500 TFLOP/s and 250 GB/s between neighbours.
const HIDDEN_FROM: usize = 4096;

impl ContextComm {
    /// What `auto` stands for: [`P2p`](Self::P2p) where a rank's tokens times `hq / hkv` are 4096 or more, so that
    /// its transfers are hidden; else [`A2a`](Self::A2a) where `ranks` divide the heads, else `A2aP2p` with the most
    /// ranks that do, or [`AllGather`](Self::AllGather) where none but 1 do.
    ///
    /// `tokens` are those of a sequence on each rank, `heads` a rank's query and key/value heads.
    pub fn auto(ranks: usize, tokens: usize, [heads, kv_heads]: [usize; 2]) -> Self {
        if tokens * heads / kv_heads.max(1) >= HIDDEN_FROM {
            return Self::P2p;
        }
        let divides =
            |low: &usize| [ranks, heads, kv_heads].iter().all(|count| count.is_multiple_of(*low));
        match (1..=ranks).rev().find(divides) {
            Some(low) if low == ranks => Self::A2a,
            None | Some(1) => Self::AllGather,
            Some(low) => Self::A2aP2p { low },
        }
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
        let low = text.strip_prefix("a2a").and_then(|text| text.strip_suffix("+p2p"));
        match (text, low.and_then(|low| low.parse().ok())) {
            ("p2p", _) => Ok(Self::P2p),
            ("all_gather", _) => Ok(Self::AllGather),
            ("a2a", _) => Ok(Self::A2a),
            (_, Some(low)) if low > 0 => Ok(Self::A2aP2p { low }),
            _ => Err(format!(
                "`{text}` is no way to exchange keys and values: `p2p`, `all_gather`, `a2a`, or `a2a2+p2p` with the ranks over which heads are shared"
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
            assert!(error.starts_with(&format!("`{text}` is no way")), "{error}");
        }
    }
}
