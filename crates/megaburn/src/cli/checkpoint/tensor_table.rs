//! The table of a checkpoint's tensors, whose rows are printed as soon as they are known.

use std::collections::BTreeMap;

use megaburn_checkpoint::{
    Checkpoint, Selection, TensorHeader, TensorSource, TensorStatistics, statistics,
};
use megaburn_train::TrainError;
use serde_json::{Value, json};

use super::super::print;

/// Characters of a number with statistics.
const NUMBER: usize = 11;

/// Prints the tensors of `selection`, which are those of `checkpoint`, as a table or as JSON.
///
/// # Errors
/// A tensor cannot be read; standard output cannot be written.
pub(super) fn print_tensors(
    checkpoint: &Checkpoint,
    selection: &Selection<'_>,
    with_statistics: bool,
    json: bool,
) -> Result<(), TrainError> {
    let headers = selection.headers();
    let pieces = num_pieces(checkpoint);
    let num_pieces = |header: &TensorHeader| pieces.get(header.name.as_str()).copied().unwrap_or(0);
    let widths = Widths::of(&headers);
    if !json {
        print::result(widths.head(with_statistics))?;
    }
    for header in &headers {
        let found = with_statistics
            .then(|| statistics(selection, header))
            .transpose()?;
        let pieces = num_pieces(header);
        if json {
            print::result(tensor_json(header, pieces, found.as_ref()))?;
        } else {
            print::result(widths.row(header, pieces, found.as_ref()))?;
        }
    }
    Ok(())
}

/// In how many pieces each tensor is stored.
fn num_pieces(checkpoint: &Checkpoint) -> BTreeMap<&str, usize> {
    let mut count = BTreeMap::new();
    let files = checkpoint.manifest().files.iter();
    for piece in files.flat_map(|file| &file.pieces) {
        *count.entry(piece.tensor.as_str()).or_default() += 1;
    }
    count
}

/// Characters of the columns whose texts are known before values are read.
struct Widths {
    name: usize,
    shape: usize,
}

impl Widths {
    fn of(headers: &[TensorHeader]) -> Self {
        let widest = |text: fn(&TensorHeader) -> String, head: &str| {
            let texts = headers.iter().map(|header| text(header).chars().count());
            texts.chain([head.len()]).max().unwrap_or(0)
        };
        Self {
            name: widest(|header| header.name.clone(), "tensor"),
            shape: widest(|header| format!("{:?}", header.shape), "shape"),
        }
    }

    fn head(&self, with_statistics: bool) -> String {
        let Self { name, shape } = self;
        let mut line = format!(
            "{:name$}  {:5}  {:shape$}  {:>6}",
            "tensor", "dtype", "shape", "pieces"
        );
        if with_statistics {
            for head in ["mean", "std", "min", "max", "norm"] {
                line += &format!("  {head:>NUMBER$}");
            }
            line += &format!("  {:>6}  {:>5}  {:>5}", "zeros", "nan", "inf");
        }
        line
    }

    fn row(
        &self,
        header: &TensorHeader,
        pieces: usize,
        found: Option<&TensorStatistics>,
    ) -> String {
        let Self { name, shape } = self;
        let mut line = format!(
            "{:name$}  {:5}  {:shape$}  {pieces:>6}",
            header.name,
            header.dtype.name(),
            format!("{:?}", header.shape)
        );
        if let Some(found) = found {
            for value in [found.mean, found.std, found.min, found.max, found.norm] {
                line += &format!("  {:>NUMBER$}", number(value));
            }
            let zeros = format!("{:.1}%", 100.0 * found.share_of_zeros());
            line += &format!(
                "  {zeros:>6}  {:>5}  {:>5}",
                found.num_nan, found.num_infinite
            );
        }
        line
    }
}

/// A number with five digits; `-` for one that does not exist.
fn number(value: f64) -> String {
    if value.is_nan() {
        return "-".into();
    }
    format!("{value:.4e}")
}

fn tensor_json(header: &TensorHeader, pieces: usize, found: Option<&TensorStatistics>) -> Value {
    let statistics = found.map(|found| {
        json!({
            "values": found.num_values,
            "mean": found.mean,
            "std": found.std,
            "min": found.min,
            "max": found.max,
            "norm": found.norm,
            "zeros": found.num_zeros,
            "nan": found.num_nan,
            "infinite": found.num_infinite,
        })
    });
    let mut tensor = json!({
        "kind": "tensor",
        "name": header.name,
        "dtype": header.dtype.name(),
        "shape": header.shape,
        "pieces": pieces,
    });
    if let Some(statistics) = statistics {
        tensor["statistics"] = statistics;
    }
    tensor
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;

    #[test]
    fn rows_stand_below_their_heads() {
        let header = |name: &str, shape: &[usize]| TensorHeader {
            name: name.into(),
            dtype: DType::BF16,
            shape: shape.to_vec(),
        };
        let headers = [header("a.long.name", &[2]), header("b", &[1000, 2])];
        let widths = Widths::of(&headers);
        let found = TensorStatistics {
            num_values: 2,
            mean: -1.5,
            std: f64::NAN,
            min: 1e-300,
            max: 3.0,
            norm: 1234.5,
            num_zeros: 1,
            num_nan: 0,
            num_infinite: 7,
        };
        let head = widths.head(true);
        let row = widths.row(&headers[0], 4, Some(&found));
        assert_eq!(head.len(), row.len(), "{head}\n{row}");
        let expected = "a.long.name  bf16   [2]             4    -1.5000e0            -";
        assert!(row.starts_with(expected), "{row}");
        assert!(row.ends_with("   50.0%      0      7"), "{row}");
        assert_eq!(
            widths.head(false).len(),
            widths.row(&headers[1], 4, None).len()
        );
    }
}
