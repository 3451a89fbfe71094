//! The collectives that are measured, over the host and over NCCL.

/// A collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the collectives'")]
pub enum Collective {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
}

impl Collective {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllToAll,
    ];

    /// Its name, as PyTorch's.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
        }
    }

    /// What nccl-tests multiplies bytes over time with, for the bandwidth of the links.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        let share = (ranks - 1) as f64 / ranks as f64;
        if self == Self::AllReduce {
            2.0 * share
        } else {
            share
        }
    }
}

/// A size for people.
pub fn label(bytes: usize) -> String {
    match bytes {
        0..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}
