/// A state tensor that an optimizer keeps for a parameter. The names are PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Moment {
    /// The decaying mean of gradients.
    ExpAvg,
    /// The decaying mean of squared gradients.
    ExpAvgSq,
    /// The decaying sum of gradients or, for Muon, their mean.
    MomentumBuffer,
}

impl Moment {
    /// All variants.
    pub const ALL: [Moment; 3] = [Moment::ExpAvg, Moment::ExpAvgSq, Moment::MomentumBuffer];

    /// `exp_avg`, `exp_avg_sq` or `momentum_buffer`.
    pub fn name(self) -> &'static str {
        match self {
            Moment::ExpAvg => "exp_avg",
            Moment::ExpAvgSq => "exp_avg_sq",
            Moment::MomentumBuffer => "momentum_buffer",
        }
    }
}
