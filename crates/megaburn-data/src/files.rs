//! Reads text from the user's files.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::Value;

use crate::{
    corpus::Corpus,
    endings::check_ending,
    error::DataError,
    json::{kind, no_field, parse_line},
    remote::missing,
};

impl Corpus {
    /// Reads the text of a file:
    /// - `.jsonl` and `.ndjson`: one document per line, in the field `text` ([`Self::from_jsonl`])
    /// - `.json`: one document per line, or one array of such objects ([`Self::from_json`])
    /// - other files: one document of UTF-8, without a byte order mark
    ///
    /// # Errors
    /// - The file is missing, a directory, unreadable, empty or not UTF-8.
    /// - A line or an element is not a JSON object with that field.
    /// - The extension is that of a file that holds no text, such as `.parquet`.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, DataError> {
        let path = path.as_ref();
        let extension = path
            .extension()
            .unwrap_or_default()
            .to_string_lossy()
            .to_lowercase();
        match extension.as_str() {
            "jsonl" | "ndjson" => Self::from_jsonl(path, "text"),
            "json" => Self::from_json(path, "text"),
            _ => {
                check_ending(path, &extension)?;
                let text = read_text(path)?;
                Self::from_documents(path.display().to_string(), vec![text])
            }
        }
    }

    /// Reads the documents of a file that holds one JSON array of objects, one object, or one
    /// object per line. The text of each object is in `field`. Empty documents are dropped.
    ///
    /// # Errors
    /// As [`Self::from_file`].
    pub fn from_json(path: impl AsRef<Path>, field: &str) -> Result<Self, DataError> {
        let path = path.as_ref();
        let text = read_text(path)?;
        let elements = match serde_json::from_str(&text) {
            Ok(Value::Array(elements)) => elements,
            Ok(single) => vec![single],
            // The file is not a single JSON value: a truncated array, or one object per line.
            Err(error) if text.trim_start().starts_with('[') => {
                let path = path.into();
                let why = format!("its array is not valid JSON ({error})");
                return Err(DataError::Json {
                    path,
                    why,
                    field: field.into(),
                });
            }
            Err(_) => return Self::from_lines(path, &text, field),
        };
        let documents = elements.into_iter().enumerate().map(|(index, value)| {
            document_of(value, field).map_err(|why| DataError::Json {
                path: path.into(),
                why: format!("element {}: {why}", index + 1),
                field: field.into(),
            })
        });
        let documents = documents.collect::<Result<_, _>>()?;
        Self::from_documents(path.display().to_string(), documents)
    }

    /// Reads the documents of a file that holds one JSON object per line, with the text in `field`.
    /// Blank lines and empty documents are dropped.
    ///
    /// # Errors
    /// As [`Self::from_file`].
    pub fn from_jsonl(path: impl AsRef<Path>, field: &str) -> Result<Self, DataError> {
        let path = path.as_ref();
        Self::from_lines(path, &read_text(path)?, field)
    }

    fn from_lines(path: &Path, text: &str, field: &str) -> Result<Self, DataError> {
        let documents = text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty())
            .map(|(i, line)| {
                let document = parse_line(line).and_then(|value| document_of(value, field));
                document.map_err(|why| DataError::JsonLine {
                    path: path.into(),
                    line: i + 1,
                    field: field.into(),
                    why,
                })
            })
            .collect::<Result<_, _>>()?;
        Self::from_documents(path.display().to_string(), documents)
    }
}

fn document_of(value: Value, field: &str) -> Result<String, String> {
    match value {
        Value::Object(mut fields) => match fields.remove(field) {
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(format!("field `{field}` is {}, not a string", kind(&other))),
            None => Err(no_field(field, fields.keys())),
        },
        other => Err(format!("{}, not an object", kind(&other))),
    }
}

/// Reads the text of a file, without a byte order mark.
///
/// # Errors
/// The file does not exist, is a folder, cannot be read, or is not UTF-8.
pub fn read_text(path: &Path) -> Result<String, DataError> {
    let unreadable = |source: std::io::Error| match source.kind() {
        ErrorKind::NotFound => missing(path),
        _ => DataError::Io {
            path: path.into(),
            source,
        },
    };
    if fs::metadata(path).map_err(unreadable)?.is_dir() {
        return Err(DataError::Directory { path: path.into() });
    }
    let mut text = String::from_utf8(fs::read(path).map_err(unreadable)?).map_err(|error| {
        DataError::NotUtf8 {
            path: path.into(),
            offset: error.utf8_error().valid_up_to(),
            size: error.as_bytes().len(),
        }
    })?;
    if text.starts_with('\u{FEFF}') {
        text.drain(..'\u{FEFF}'.len_utf8());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use rstest::rstest;
    use tempfile::TempDir;

    use super::*;

    fn file(name: &str, content: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        (dir, path)
    }

    fn refusal(path: &Path) -> String {
        Corpus::from_file(path).unwrap_err().to_string()
    }

    #[rstest]
    #[case("a.txt", "one\r\ntwo\n\n", &["one\r\ntwo\n\n"])]
    #[case("a.md", "# ü", &["# ü"])]
    #[case("noextension", "\u{FEFF}x", &["x"])]
    #[case("a.jsonl", "{\"text\": \"a\\nb\", \"n\": 1}\r\n\n{\"text\":\"\"}\n{\"text\":\"ü\"}", &["a\nb", "ü"])]
    #[case("A.JSONL", "\u{FEFF}{\"text\":\"x\"}\n", &["x"])]
    #[case("a.ndjson", "{\"text\":\"x\"}\n{\"text\":\"y\"}\n", &["x", "y"])]
    #[case("a.json", "{\"text\":\"x\"}\n\n{\"text\":\"y\"}\n", &["x", "y"])]
    #[case("a.json", "{\"text\":\"x\"}", &["x"])]
    #[case("a.JSON", "\u{FEFF}[{\"text\":\"x\", \"n\": 1},\n {\"text\":\"\"}, {\"text\":\"y\"}]\n", &["x", "y"])]
    fn a_file_is_read_by_its_kind(
        #[case] name: &str,
        #[case] content: &str,
        #[case] documents: &[&str],
    ) {
        let (_dir, path) = file(name, content);
        let corpus = Corpus::from_file(&path).unwrap();
        assert_eq!(corpus.documents(), documents);
        assert_eq!(corpus.name(), path.display().to_string());
        assert_eq!(corpus.note(), None);
    }

    #[test]
    fn the_text_may_stand_in_another_field() {
        let (_dir, path) = file("a.jsonl", "{\"content\": \"x\", \"text\": 3}\n");
        assert_eq!(
            Corpus::from_jsonl(&path, "content").unwrap().documents(),
            ["x"]
        );
    }

    #[rstest]
    #[case(
        "{\"text\": \"a\"",
        "not valid JSON (EOF while parsing an object at column 12)"
    )]
    #[case("hello", "not valid JSON (expected value at column 1)")]
    #[case("{\"body\": \"a\", \"id\": 1}", "no field `text`, only [body, id]")]
    #[case("{\"text\": null}", "field `text` is null, not a string")]
    #[case("[\"text\"]", "an array, not an object")]
    fn a_bad_line_is_named_by_its_number(#[case] line: &str, #[case] why: &str) {
        let (_dir, path) = file("bad.jsonl", format!("{{\"text\":\"ok\"}}\n\n{line}\n"));
        let shown = path.display();
        let expected = format!(
            "data file `{shown}`, line 3: {why}; every line must be one JSON object with its text in the field `text`"
        );
        assert_eq!(refusal(&path), expected);
    }

    #[rstest]
    #[case(
        "[{\"text\": \"a\"}, {\"body\": \"b\"}]",
        "element 2: no field `text`, only [body]"
    )]
    #[case("[{\"text\": \"a\"}, \"b\"]", "element 2: a string, not an object")]
    #[case("{\"data\": [1]}", "element 1: no field `text`, only [data]")]
    #[case(
        "[{\"text\": \"a\"}",
        "its array is not valid JSON (EOF while parsing a list at line 1 column 14)"
    )]
    #[case("3", "element 1: a number, not an object")]
    #[case(
        "{\"text\": \"a\"}\nb",
        "line 2: not valid JSON (expected value at column 1)"
    )]
    fn json_that_holds_no_documents_is_refused(#[case] content: &str, #[case] why: &str) {
        let (_dir, path) = file("a.json", content);
        let refusal = refusal(&path);
        assert!(
            refusal.starts_with("data file `") && refusal.contains(why),
            "{refusal}"
        );
        assert!(
            refusal.contains("with its text in the field `text`"),
            "{refusal}"
        );
    }

    #[test]
    fn a_missing_file_is_named() {
        let (dir, _) = file("a", "a");
        let path = dir.path().join("nosuch.txt");
        let shown = path.display();
        let expected = format!("data file `{shown}` does not exist; check the path given as data");
        assert_eq!(refusal(&path), expected);
        assert!(refusal(&dir.path().join("nosuch.jsonl")).contains("does not exist"));
    }

    #[test]
    fn a_directory_is_refused() {
        let (dir, _) = file("a", "a");
        let shown = dir.path().display();
        let expected = format!(
            "data file `{shown}` is a directory; give one text, .jsonl, .ndjson or .json file"
        );
        assert_eq!(refusal(dir.path()), expected);
    }

    #[rstest]
    #[case("a.txt", "")]
    #[case("a.txt", "\u{FEFF}")]
    #[case("a.jsonl", "\n \n")]
    #[case("a.jsonl", "{\"text\":\"\"}\n")]
    fn an_empty_file_is_refused(#[case] name: &str, #[case] content: &str) {
        let (_dir, path) = file(name, content);
        let shown = path.display();
        let expected = format!("`{shown}` is empty; give a text with at least one sample");
        assert_eq!(refusal(&path), expected);
    }

    #[rstest]
    #[case("a.txt", b"abc\xFFdef", 3, 7)]
    #[case("a.txt", b"abcd\xC3", 4, 5)]
    #[case("a.jsonl", b"{\"text\":\"\xE2\x28\"}", 9, 13)]
    fn bytes_that_are_not_utf8_are_refused_with_their_place(
        #[case] name: &str,
        #[case] content: &[u8],
        #[case] offset: usize,
        #[case] size: usize,
    ) {
        let (_dir, path) = file(name, content);
        let shown = path.display();
        let expected = format!(
            "data file `{shown}` is not UTF-8: byte {offset} of {size} does not start a valid character; convert the file to UTF-8"
        );
        assert_eq!(refusal(&path), expected);
    }

    #[test]
    fn a_file_behind_a_file_cannot_be_read() {
        let (_dir, path) = file("a.txt", "a");
        let path = path.join("b.txt");
        let start = format!("data file `{}` cannot be read: ", path.display());
        assert!(refusal(&path).starts_with(&start), "{}", refusal(&path));
    }
}
