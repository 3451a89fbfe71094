//! The collectives that are measured, over the host and over NCCL.

/// A measured collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "variants are named after the collectives")]
pub enum Collective {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
}

impl Collective {
    /// All measured collectives.
    pub const ALL: [Self; 4] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllToAll,
    ];

    /// The collective's name, as in PyTorch.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
        }
    }

    /// The factor from size over time to bus bandwidth, as nccl-tests defines it.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        let share = (ranks - 1) as f64 / ranks as f64;
        if self == Self::AllReduce {
            2.0 * share
        } else {
            share
        }
    }
}

/// Formats a size in bytes as KiB, MiB or GiB.
pub fn label(bytes: usize) -> String {
    match bytes {
        0..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}
