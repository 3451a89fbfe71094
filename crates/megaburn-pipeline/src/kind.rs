use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::stages::Placement;

/// The schedules that can be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ScheduleKind {
    /// All forwards, then all backwards (Huang et al., arXiv 1811.06965). With several chunks, one
    /// chunk after another (Lamy-Poirier's breadth-first order, arXiv 2211.05953).
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward (Narayanan et al., arXiv 2104.04473, section 2.2).
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
    /// 1F1B over several chunks per rank (same paper; Megatron-LM's order by groups).
    #[serde(rename = "interleaved")]
    Interleaved,
    /// 1F1B with weight gradients moved into its bubble (Qi et al., arXiv 2401.10241, section 2.1).
    #[serde(rename = "zb-h1")]
    ZbH1,
    /// Two chunks per rank in a V: 1F1B's memory with almost no bubble (same paper, section 6; V-ZB
    /// in arXiv 2405.15362).
    #[serde(rename = "zb-v")]
    ZbV,
    /// Evaluation: no backward.
    #[serde(rename = "forward-only")]
    ForwardOnly,
}

impl ScheduleKind {
    /// Every kind.
    pub const ALL: [ScheduleKind; 6] = [
        ScheduleKind::GPipe,
        ScheduleKind::OneForwardOneBackward,
        ScheduleKind::Interleaved,
        ScheduleKind::ZbH1,
        ScheduleKind::ZbV,
        ScheduleKind::ForwardOnly,
    ];

    /// The name in command lines, files and messages.
    pub fn name(self) -> &'static str {
        match self {
            ScheduleKind::GPipe => "gpipe",
            ScheduleKind::OneForwardOneBackward => "1f1b",
            ScheduleKind::Interleaved => "interleaved",
            ScheduleKind::ZbH1 => "zb-h1",
            ScheduleKind::ZbV => "zb-v",
            ScheduleKind::ForwardOnly => "forward-only",
        }
    }

    /// Whether the gradients of inputs and of weights are separate actions.
    pub fn splits_backward(self) -> bool {
        matches!(self, ScheduleKind::ZbH1 | ScheduleKind::ZbV)
    }

    /// Whether there is a backward.
    pub fn has_backward(self) -> bool {
        self != ScheduleKind::ForwardOnly
    }

    /// The default number of chunks per rank.
    pub fn default_num_chunks(self) -> usize {
        match self {
            ScheduleKind::Interleaved | ScheduleKind::ZbV => 2,
            _ => 1,
        }
    }

    /// The default assignment of stages to ranks.
    pub fn default_placement(self) -> Placement {
        match self {
            ScheduleKind::ZbV => Placement::Vee,
            _ => Placement::Loop,
        }
    }
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_has_one_name_everywhere() {
        for kind in ScheduleKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            assert_eq!(serde_json::to_string(&kind).unwrap(), format!("\"{kind}\""));
        }
        let error = "zb-h2".parse::<ScheduleKind>().unwrap_err();
        assert!(error.to_string().contains("`zb-h2`") && error.to_string().contains("1f1b"));
    }
}
