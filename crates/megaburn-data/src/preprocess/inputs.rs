//! Finds the files to read: files, folders and patterns as they are given.

use std::collections::HashSet;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use glob::{MatchOptions, glob_with};
use megaburn_store::is_url;
use serde_json::{Value, json};

use super::unpack::Packing;
use crate::{endings::check_ending, error::DataError};

/// Whether this build reads Parquet files.
const READS_PARQUET: bool = cfg!(feature = "parquet");

/// How the documents of a file are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The whole file is one document.
    Text,
    /// One JSON object per line.
    Lines,
    /// One array of JSON objects, or one object per line.
    Json,
    /// A table, with a document in each row.
    Parquet,
}

/// A file to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InputFile {
    pub(super) path: PathBuf,
    pub(super) kind: Kind,
    pub(super) packing: Packing,
    pub(super) num_bytes: u64,
    modified: u128,
}

/// All files to read, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Inputs {
    pub(super) files: Vec<InputFile>,
    /// Number of files in folders that were left out, because their endings are not of text, and of
    /// linked folders.
    pub(super) num_left_out: usize,
}

impl Inputs {
    /// The files of all `inputs`, in this order. A folder stands for the files below it with the
    /// endings of text or JSON, a pattern like `data/*.jsonl` for what it matches; both are sorted
    /// by path.
    ///
    /// # Errors
    /// Nothing is found for an input, a file is found twice, or it holds no text by its ending.
    pub(super) fn find(inputs: &[PathBuf]) -> Result<Self, DataError> {
        let mut found = Self::default();
        for input in inputs {
            let before = found.files.len();
            if is_url(input) {
                let url = input.display().to_string();
                return Err(DataError::UrlOfText { url });
            }
            if input.exists() {
                found.add(input)?;
            } else {
                for path in matches(input)? {
                    found.add(&path)?;
                }
            }
            if found.files.len() == before {
                let path = input.clone();
                return Err(DataError::NoInput { path });
            }
        }
        let mut seen = HashSet::new();
        for file in &found.files {
            let real =
                fs::canonicalize(&file.path).map_err(|source| unreadable(&file.path, source));
            if !seen.insert(real?) {
                let path = file.path.clone();
                return Err(DataError::InputTwice { path });
            }
        }
        Ok(found)
    }

    /// Adds a file, or the files of a folder.
    fn add(&mut self, path: &Path) -> Result<(), DataError> {
        let metadata = fs::metadata(path).map_err(|source| unreadable(path, source))?;
        if metadata.is_dir() {
            return self.add_folder(path);
        }
        if !metadata.is_file() {
            let path = path.into();
            return Err(DataError::NoFile { path });
        }
        let (kind, packing, inner) = kind_of(path);
        if kind == Kind::Parquet && !READS_PARQUET {
            let path = path.into();
            return Err(DataError::NoParquet { path });
        }
        if kind != Kind::Parquet {
            let ending = inner.extension().unwrap_or_default().to_string_lossy();
            check_ending(path, &ending.to_lowercase())?;
        }
        self.files
            .push(InputFile::new(path, kind, packing, &metadata));
        Ok(())
    }

    fn add_folder(&mut self, folder: &Path) -> Result<(), DataError> {
        let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let entries = entries.map_err(|source| unreadable(folder, source))?;
        let mut paths: Vec<PathBuf> = entries.iter().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with('.') {
                continue;
            }
            if path.is_dir() {
                // A link to a folder could lead back to this one.
                if path.is_symlink() {
                    self.num_left_out += 1;
                } else {
                    self.add_folder(&path)?;
                }
                continue;
            }
            let (kind, _, inner) = kind_of(&path);
            let ending = inner.extension().unwrap_or_default().to_string_lossy();
            let is_read = match kind {
                Kind::Text => ending.eq_ignore_ascii_case("txt"),
                Kind::Parquet => READS_PARQUET,
                Kind::Lines | Kind::Json => true,
            };
            if !is_read {
                self.num_left_out += 1;
            } else {
                self.add(&path)?;
            }
        }
        Ok(())
    }

    /// Number of bytes of all files, as they are on the disk.
    pub(super) fn num_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.num_bytes).sum()
    }

    /// Checks that no file was changed since it was found.
    ///
    /// # Errors
    /// A file has another size or time of modification.
    pub(super) fn check_unchanged(&self) -> Result<(), DataError> {
        for file in &self.files {
            let path = &file.path;
            let metadata = fs::metadata(path).map_err(|source| unreadable(path, source))?;
            if InputFile::new(path, file.kind, file.packing, &metadata) != *file {
                let path = path.clone();
                return Err(DataError::Changed { path });
            }
        }
        Ok(())
    }

    /// What decides the documents, and whether a file has changed since.
    pub(super) fn identity(&self) -> Value {
        let of = |file: &InputFile| {
            json!({
                "path": file.path.display().to_string(),
                "size": file.num_bytes,
                "modified": file.modified.to_string(),
            })
        };
        self.files.iter().map(of).collect()
    }
}

impl InputFile {
    fn new(path: &Path, kind: Kind, packing: Packing, metadata: &Metadata) -> Self {
        let modified = metadata.modified().ok();
        let since = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Self {
            path: path.into(),
            kind,
            packing,
            num_bytes: metadata.len(),
            modified: since.map_or(0, |since| since.as_nanos()),
        }
    }
}

/// The kind of a file by its name, and the name without the ending of a compression.
fn kind_of(path: &Path) -> (Kind, Packing, PathBuf) {
    let ending = |path: &Path| {
        let ending = path.extension().unwrap_or_default();
        ending.to_string_lossy().to_lowercase()
    };
    let packing = Packing::of_ending(&ending(path));
    let inner = match packing {
        Packing::None => path.to_path_buf(),
        Packing::Gzip | Packing::Zstd => path.with_extension(""),
    };
    let kind = match ending(&inner).as_str() {
        "jsonl" | "ndjson" => Kind::Lines,
        "json" => Kind::Json,
        "parquet" if packing == Packing::None => Kind::Parquet,
        _ => Kind::Text,
    };
    (kind, packing, inner)
}

/// Whether a file is text by its name, and neither compressed nor a table.
pub(crate) fn is_read_as_is(path: &Path) -> bool {
    let (kind, packing, _) = kind_of(path);
    packing == Packing::None && kind != Kind::Parquet
}

/// What a pattern matches, sorted.
fn matches(pattern: &Path) -> Result<Vec<PathBuf>, DataError> {
    let text = pattern.to_string_lossy();
    if !text.contains(['*', '?', '[']) {
        let path = pattern.into();
        return Err(DataError::Missing { path });
    }
    let options = MatchOptions {
        require_literal_leading_dot: true,
        ..MatchOptions::new()
    };
    let paths = glob_with(&text, options).map_err(|error| DataError::Pattern {
        pattern: text.to_string(),
        why: error.to_string(),
    })?;
    paths.collect::<Result<Vec<_>, _>>().map_err(|error| {
        let path = error.path().to_path_buf();
        unreadable(&path, error.into())
    })
}

fn unreadable(path: &Path, source: std::io::Error) -> DataError {
    let path = path.into();
    match source.kind() {
        ErrorKind::NotFound => DataError::Missing { path },
        _ => DataError::Io { path, source },
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("a.jsonl", Kind::Lines, Packing::None)]
    #[case("a.NDJSON.gz", Kind::Lines, Packing::Gzip)]
    #[case("a.json.zst", Kind::Json, Packing::Zstd)]
    #[case("a.txt", Kind::Text, Packing::None)]
    #[case("a.gz", Kind::Text, Packing::Gzip)]
    #[case("a", Kind::Text, Packing::None)]
    #[case("a.parquet", Kind::Parquet, Packing::None)]
    #[case("a.parquet.gz", Kind::Text, Packing::Gzip)]
    fn the_name_says_how_a_file_is_read(
        #[case] name: &str,
        #[case] kind: Kind,
        #[case] packing: Packing,
    ) {
        let found = kind_of(Path::new(name));
        assert_eq!((found.0, found.1), (kind, packing));
    }

    fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("b/c")).unwrap();
        for name in [
            "b/2.jsonl",
            "b/10.jsonl",
            "b/c/x.txt",
            "a.json",
            "n.md",
            ".h.txt",
            "t.bin",
        ] {
            fs::write(dir.path().join(name), "{}").unwrap();
        }
        symlink(dir.path(), dir.path().join("b/loop")).unwrap();
        dir
    }

    fn find(dir: &Path, inputs: &[&str]) -> Result<(Vec<String>, usize), String> {
        let inputs: Vec<_> = inputs.iter().map(|input| dir.join(input)).collect();
        let found = Inputs::find(&inputs).map_err(|error| error.to_string())?;
        let name = |file: &InputFile| {
            let path = file.path.strip_prefix(dir).unwrap();
            path.display().to_string()
        };
        Ok((found.files.iter().map(name).collect(), found.num_left_out))
    }

    #[test]
    fn folders_and_patterns_give_sorted_files() {
        let dir = folder();
        let all = ["a.json", "b/10.jsonl", "b/2.jsonl", "b/c/x.txt"]
            .map(String::from)
            .to_vec();
        // The link to a folder and the link to nothing are counted as well.
        symlink("nowhere", dir.path().join("README.md")).unwrap();
        assert_eq!(find(dir.path(), &[""]), Ok((all.clone(), 4)));
        fs::write(dir.path().join("b/.hidden.jsonl"), "{}").unwrap();
        assert_eq!(
            find(dir.path(), &["b/*.jsonl"]),
            Ok((all[1..3].to_vec(), 0))
        );
        let refusal = Inputs::find(&["/dev/null".into()]).unwrap_err().to_string();
        assert!(refusal.contains("is no regular file"), "{refusal}");
        assert_eq!(
            find(dir.path(), &["n.md", "b/c"]).unwrap().0,
            ["n.md", "b/c/x.txt"]
        );
    }

    #[test]
    fn tables_are_read_by_builds_that_can() {
        let dir = folder();
        fs::write(dir.path().join("b/c/y.parquet"), "PAR1").unwrap();
        let in_folder = find(dir.path(), &["b/c"]).unwrap();
        let alone = find(dir.path(), &["b/c/y.parquet"]);
        if READS_PARQUET {
            assert_eq!((in_folder.0.len(), in_folder.1), (2, 0));
            assert_eq!(alone.unwrap().0, ["b/c/y.parquet"]);
        } else {
            assert_eq!((in_folder.0.len(), in_folder.1), (1, 1));
            let refusal = alone.unwrap_err();
            assert!(refusal.contains("--features parquet"), "{refusal}");
        }
    }

    #[rstest]
    #[case(&["no.jsonl"], "does not exist")]
    #[case(&["*.parquet"], "no file with text")]
    #[case(&["b/*.jsonl", "b/2.jsonl"], "is given twice")]
    #[case(&["t.bin"], "is not text")]
    #[case(&["[a"], "is not a pattern")]
    fn an_input_without_text_is_named(#[case] inputs: &[&str], #[case] message: &str) {
        let refusal = find(folder().path(), inputs).unwrap_err();
        assert!(refusal.contains(message), "{refusal}");
    }
}
