use burn::config::Config;

/// Which dimension of a linear layer's weight `[d_input, d_output]` is split over the group.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Split {
    /// The output features: `Y_i = X W_i`.
    Column,
    /// The input features: `Y = sum_i X_i W_i`.
    Row,
}

impl Split {
    /// Which features are split.
    pub(super) fn features(self) -> &'static str {
        match self {
            Self::Column => "output",
            Self::Row => "input",
        }
    }
}
