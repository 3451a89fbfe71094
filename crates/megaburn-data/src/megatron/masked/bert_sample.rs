/// A sample of BERT. Each vector has the sequence length of the data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BertSample {
    /// The tokens `[CLS] A [SEP] B [SEP]` with masks; 0 in place of padding.
    pub text: Vec<u32>,
    /// The token types: 1 for B and the `[SEP]` after it, else 0.
    pub types: Vec<u32>,
    /// The tokens that were masked, at their positions; elsewhere -1.
    pub labels: Vec<i64>,
    /// Whether the segments are in the wrong order: the label of the classification head.
    pub is_random: bool,
    /// Whether a position has a token, and no padding.
    pub padding_mask: Vec<bool>,
    /// Whether a position counts in the loss, because it was masked.
    pub loss_mask: Vec<bool>,
    /// Whether tokens of the sentences were left out.
    pub truncated: bool,
}
