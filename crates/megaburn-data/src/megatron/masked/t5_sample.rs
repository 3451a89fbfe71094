/// A sample of T5. The vectors of the encoder have its sequence length, the others that of the
/// decoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct T5Sample {
    /// The tokens of the encoder; 0 in place of padding.
    pub text_enc: Vec<u32>,
    /// The tokens of the decoder, from the one that begins a text on; 0 in place of padding.
    pub text_dec: Vec<u32>,
    /// The tokens that the decoder predicts, up to the one that ends a text; then -1.
    pub labels: Vec<i64>,
    /// Whether a position of the decoder counts in the loss, because it is no padding.
    pub loss_mask: Vec<bool>,
    /// Whether tokens of the sentences were left out.
    pub truncated: bool,
    /// Whether a position of the encoder has a token, and no padding.
    pub enc_mask: Vec<bool>,
    /// Whether a position of the decoder has a token, and no padding.
    pub dec_mask: Vec<bool>,
}
