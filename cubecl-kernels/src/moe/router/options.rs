/// How a router computes scores from its logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScores {
    /// A softmax over all experts.
    Softmax,
    /// A sigmoid per expert.
    Sigmoid,
}

/// Group-limited routing: the experts of a token are chosen from some groups of neighboring experts
/// only (DeepSeek's node-limited routing).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterGroups {
    /// The number of groups.
    pub num: usize,
    /// The number of groups from which a token's experts are chosen.
    pub kept: usize,
    /// A group's score is the sum of this many of its best expert scores.
    pub best: usize,
}

/// How tokens are routed.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterOptions {
    /// The number of experts per token.
    pub top_k: usize,
    /// The scores by which experts are chosen.
    pub scores: RouterScores,
    /// Whether a token's weights are divided by their sum. With softmax scores, this equals the
    /// softmax over the chosen logits.
    pub normalise: bool,
    /// The factor of all weights.
    pub scale: f64,
    /// Group-limited routing; `None` chooses from all experts.
    pub groups: Option<RouterGroups>,
}

/// Added to the divisor of normalized weights.
pub(in crate::moe) const TINY: f64 = 1e-20;

impl RouterOptions {
    /// Panics unless tokens can have `top_k` of these experts.
    pub(super) fn check(&self, op: &str, num_experts: usize) {
        let Self { top_k, groups, .. } = *self;
        let within = groups.map_or(num_experts, |groups| {
            assert!(
                groups.num > 0
                    && num_experts.is_multiple_of(groups.num)
                    && groups.kept <= groups.num,
                "{op}: {num_experts} experts do not fit {groups:?}"
            );
            groups.kept * (num_experts / groups.num)
        });
        assert!(
            (1..=within).contains(&top_k),
            "{op}: top_k {top_k} must be between 1 and the number of experts to choose from, \
            {within}"
        );
    }
}
