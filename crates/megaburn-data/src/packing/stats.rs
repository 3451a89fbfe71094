use std::fmt;

/// What packing made of the documents of a data set.
///
/// `Display` prints it as one line:
///
/// ```
/// # let documents = ["a short one", "one that is longer than a sample", "another"];
/// # let documents = documents.map(String::from).to_vec();
/// use megaburn_data::{ByteTokenizer, Corpus, PackedSamplerConfig, TokenDataset};
///
/// let set = TokenDataset::new(&Corpus::from_documents("notes", documents)?, &ByteTokenizer)?;
/// let stats = PackedSamplerConfig::new(24).init(&set, |_| ())?.stats().clone();
/// assert_eq!(
///     stats.to_string(),
///     "packed 3 documents into 3 sequences of 24: 31.9% padding, 33.3% of documents cut \
///      (concatenation cuts 66.7%)"
/// );
/// # Ok::<(), megaburn_data::DataError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackingStats {
    /// The number of positions of a sample.
    pub seq_len: u64,
    /// Number of samples.
    pub num_samples: u64,
    /// Number of documents that were packed: those with two tokens or more.
    pub num_documents: u64,
    /// Number of documents that were left out: those with one token or none, which have no label.
    pub num_dropped: u64,
    /// Number of labels, which is that of positions with a token.
    pub num_labels: u64,
    /// Number of documents that are longer than a sample, and so were cut.
    pub num_cut: u64,
    /// Number of documents that would be cut if all of them were joined and divided into samples.
    pub num_cut_by_concatenation: u64,
}

impl PackingStats {
    /// The fraction of positions that have no token.
    pub fn padding(&self) -> f64 {
        let num_positions = self.seq_len * self.num_samples;
        1.0 - self.num_labels as f64 / num_positions.max(1) as f64
    }

    /// The fraction of the packed documents that were cut.
    pub fn cut(&self) -> f64 {
        self.num_cut as f64 / self.num_documents.max(1) as f64
    }

    /// The fraction of these documents that would be cut if they were joined.
    pub fn cut_by_concatenation(&self) -> f64 {
        self.num_cut_by_concatenation as f64 / self.num_documents.max(1) as f64
    }
}

impl fmt::Display for PackingStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |count: u64| if count == 1 { "" } else { "s" };
        write!(
            f,
            "packed {} document{} into {} sequence{} of {}: {:.1}% padding, {:.1}% of documents \
             cut (concatenation cuts {:.1}%)",
            self.num_documents,
            plural(self.num_documents),
            self.num_samples,
            plural(self.num_samples),
            self.seq_len,
            100.0 * self.padding(),
            100.0 * self.cut(),
            100.0 * self.cut_by_concatenation()
        )?;
        if self.num_dropped > 0 {
            let count = self.num_dropped;
            write!(f, "; {count} without a label left out")?;
        }
        Ok(())
    }
}
