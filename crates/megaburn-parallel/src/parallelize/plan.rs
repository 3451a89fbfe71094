use burn::config::Config;

/// How a layer is split.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Style {
    /// A linear layer by output features, which stay split (PyTorch's `ColwiseParallel`).
    Column,
    /// A linear layer by output features, which are gathered.
    ColumnGathered,
    /// A linear layer by input features, which are split already; the outputs are summed (PyTorch's
    /// `RowwiseParallel`).
    Row,
    /// An embedding by tokens; the vectors are summed.
    Vocabulary,
    /// Not at all: every rank has a copy, and applies it to the same activations.
    Whole,
}

/// A pattern of layers, and how they are split.
#[derive(Config, Debug, PartialEq)]
pub struct Rule {
    /// Paths of layers: `*` stands for any part of a name, and `{q,k,v}` for one of several texts.
    pub pattern: String,
    /// How these layers are split.
    pub style: Style,
    /// Heads of the layer's split features, which are never cut. `None` means single features.
    pub heads: Option<usize>,
    /// Whether several ranks may hold the same head, where there are fewer heads than ranks.
    #[config(default = false)]
    pub shared_heads: bool,
}

/// Which layers [`parallelize`](super::parallelize) splits, and how.
///
/// ```
/// use megaburn_parallel::ParallelPlan;
///
/// let plan = ParallelPlan::new()
///     .vocabulary("embedding")
///     .column("blocks.*.attention.query").heads(8)
///     .column("blocks.*.attention.{key,value}").shared_heads(2)
///     .row("blocks.*.attention.output").heads(8)
///     .column("blocks.*.mlp.up")
///     .row("blocks.*.mlp.down")
///     .column_gathered("head");
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct ParallelPlan {
    /// The rules, of which at most one matches a layer.
    #[config(default = "Vec::new()")]
    pub rules: Vec<Rule>,
}

impl ParallelPlan {
    /// Splits linear layers by output features. A row split in the same module has to follow.
    #[must_use]
    pub fn column(self, pattern: &str) -> Self {
        self.rule(pattern, Style::Column)
    }

    /// Splits linear layers by output features and gathers the outputs.
    #[must_use]
    pub fn column_gathered(self, pattern: &str) -> Self {
        self.rule(pattern, Style::ColumnGathered)
    }

    /// Splits linear layers by input features and sums the outputs.
    #[must_use]
    pub fn row(self, pattern: &str) -> Self {
        self.rule(pattern, Style::Row)
    }

    /// Splits embeddings by tokens.
    #[must_use]
    pub fn vocabulary(self, pattern: &str) -> Self {
        self.rule(pattern, Style::Vocabulary)
    }

    /// Keeps layers whole, as layers without a pattern are. A linear layer next to a column split
    /// and a row split in the same module needs it: [`parallelize`](super::parallelize) cannot see
    /// whether such a layer stands before or after them, on activations that all ranks share, or
    /// between them, where each rank would get the gradient of its own features only. Name the
    /// former here. Keys or values of one head for all queries are the latter: split them by
    /// [`column`](Self::column) with [`shared_heads(1)`](Self::shared_heads).
    #[must_use]
    pub fn whole(self, pattern: &str) -> Self {
        self.rule(pattern, Style::Whole)
    }

    /// Splits the layers `query`, `key`, `value` and `output` of attentions by `heads` heads, as
    /// [`ParallelMultiHeadAttention`](super::ParallelMultiHeadAttention) has them.
    #[must_use]
    pub fn attention(self, pattern: &str, heads: usize) -> Self {
        self.column(&format!("{pattern}.{{query,key,value}}"))
            .heads(heads)
            .row(&format!("{pattern}.output"))
            .heads(heads)
    }

    /// The number of heads that the split features of the last rule consist of. The number of ranks
    /// has to divide it.
    #[must_use]
    pub fn heads(mut self, heads: usize) -> Self {
        if let Some(rule) = self.rules.last_mut() {
            rule.heads = Some(heads);
        }
        self
    }

    /// As [`heads`](Self::heads), of keys and values that several query heads use: where there are
    /// fewer heads than ranks, ranks hold the same ones, and backward sums their gradients.
    #[must_use]
    pub fn shared_heads(mut self, heads: usize) -> Self {
        if let Some(rule) = self.rules.last_mut() {
            rule.heads = Some(heads);
            rule.shared_heads = true;
        }
        self
    }

    fn rule(mut self, pattern: &str, style: Style) -> Self {
        self.rules.push(Rule::new(pattern.into(), style));
        self
    }
}
