//! Rejects files that hold no plain text, by their file name extension.

use std::path::Path;

use crate::error::DataError;

/// File name extensions of files that hold no plain text, and what the user should do instead.
const NO_TEXT: [(&[&str], &str); 3] = [
    (
        &["parquet", "arrow", "feather", "avro", "h5", "hdf5", "lance"],
        "write its texts to a .jsonl file, one JSON object per line with the text in the field \
        `text`",
    ),
    (
        &["gz", "zst", "xz", "bz2", "lz4", "zip", "tar", "tgz", "7z"],
        "unpack it and give the .txt or .jsonl file",
    ),
    (
        &[
            "bin",
            "idx",
            "npy",
            "npz",
            "pt",
            "pth",
            "safetensors",
            "pkl",
            "pdf",
            "docx",
        ],
        "give the text itself, as a .txt or .jsonl file; it is tokenized by megaburn",
    ),
];

/// Checks that the lower-case extension `ending` of a file may be that of plain text.
///
/// # Errors
/// The file exists, and its extension is that of a file that holds no text.
pub(crate) fn check_ending(path: &Path, ending: &str) -> Result<(), DataError> {
    let no_text = NO_TEXT
        .iter()
        .find(|(endings, _)| endings.contains(&ending));
    if let Some((_, remedy)) = no_text
        && path.is_file()
    {
        return Err(DataError::NoText {
            path: path.into(),
            ending: ending.into(),
            remedy,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::corpus::Corpus;

    #[rstest]
    #[case(
        "t.parquet",
        "is not text: .parquet files are not supported; write its texts to a .jsonl file"
    )]
    #[case("t.txt.GZ", "is not text: .gz files are not supported; unpack it")]
    #[case(
        "t.bin",
        "is not text: .bin files are not supported; give the text itself"
    )]
    fn a_file_that_is_no_text_by_its_name_is_refused(#[case] name: &str, #[case] message: &str) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, "It was the best of times.").unwrap();
        let refusal = Corpus::from_file(&path).unwrap_err().to_string();
        assert!(refusal.contains(message), "{refusal}");
    }

    #[test]
    fn one_that_is_not_there_is_said_to_be_missing() {
        let refusal = Corpus::from_file("nowhere/t.parquet")
            .unwrap_err()
            .to_string();
        assert!(refusal.contains("does not exist"), "{refusal}");
    }
}
