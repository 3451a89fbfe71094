//! Finds the texts of a JSON record.

use serde_json::Value;

use super::{long_text::why_not_utf8, records::Content};
use crate::json::{kind, no_field, parse_line};

/// The sequences of the document of each key.
pub(super) type Texts<'a> = Vec<Vec<&'a str>>;

/// Calls `with` with the texts of a record: of each key the sequences of its document, which is one
/// text, or a list of texts.
///
/// # Errors
/// The record is not UTF-8 or not JSON, a key is missing, or its value is not text.
pub(super) fn texts_of<T>(
    content: &Content,
    keys: &[String],
    with: impl FnOnce(Texts<'_>) -> Result<T, String>,
) -> Result<T, String> {
    let parsed;
    let value = match content {
        Content::Text(text) => return with(vec![vec![utf8(text, "file")?]; keys.len()]),
        Content::Piece(piece) => return with(vec![vec![&piece.text]; keys.len()]),
        Content::NotUtf8(why) => return Err(why.clone()),
        #[cfg(feature = "parquet")]
        Content::Row(texts) => {
            let texts = keys.iter().zip(texts).map(|(key, text)| match text {
                Some(text) => Ok(vec![utf8(text, "text")?]),
                None => Err(format!("column `{key}` is null, not a string")),
            });
            return with(texts.collect::<Result<_, _>>()?);
        }
        Content::Element(element) => {
            parsed = parse_line(utf8(element, "element")?.trim_ascii())?;
            &parsed
        }
        Content::Line(line) => {
            parsed = parse_line(utf8(line, "line")?.trim_ascii_end())?;
            &parsed
        }
    };
    with(
        keys.iter()
            .map(|key| sequences(value, key))
            .collect::<Result<_, _>>()?,
    )
}

fn utf8<'a>(bytes: &'a [u8], whole: &str) -> Result<&'a str, String> {
    std::str::from_utf8(bytes).map_err(|error| {
        let at = error.valid_up_to();
        why_not_utf8(at as u64, bytes.len() as u64, whole)
    })
}

/// The texts of a key. `a.b` is the field `b` of the object `a`, if there is no field `a.b`.
fn sequences<'a>(record: &'a Value, key: &str) -> Result<Vec<&'a str>, String> {
    let mut value = record;
    let mut rest = key;
    loop {
        let Value::Object(fields) = value else {
            return Err(match value == record && rest == key {
                true => format!("{}, not an object", kind(value)),
                false => {
                    let parent = key[..key.len() - rest.len()].trim_end_matches('.');
                    format!("field `{parent}` is {}, not an object", kind(value))
                }
            });
        };
        if let Some(found) = fields.get(rest) {
            return texts(found, key);
        }
        let Some((parent, child)) = rest.split_once('.') else {
            return Err(no_field(key, fields.keys()));
        };
        value = fields
            .get(parent)
            .ok_or_else(|| no_field(key, fields.keys()))?;
        rest = child;
    }
}

fn texts<'a>(value: &'a Value, key: &str) -> Result<Vec<&'a str>, String> {
    let text = |value: &'a Value, what: String| match value {
        Value::String(text) => Ok(text.as_str()),
        other => Err(format!("{what} is {}, not a string", kind(other))),
    };
    match value {
        Value::Array(values) => values
            .iter()
            .enumerate()
            .map(|(index, value)| text(value, format!("element {} of `{key}`", index + 1)))
            .collect(),
        value => Ok(vec![text(value, format!("field `{key}`"))?]),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// The texts of a line, with `|` between sequences and `;` between keys.
    fn found(line: &[u8], keys: &[&str]) -> Result<String, String> {
        let keys: Vec<String> = keys.iter().map(|key| key.to_string()).collect();
        texts_of(&Content::Line(line.into()), &keys, |texts| {
            let joined: Vec<String> = texts.iter().map(|texts| texts.join("|")).collect();
            Ok(joined.join(";"))
        })
    }

    #[rstest]
    #[case("{\"text\": \"x\\u0000y\"}\r\n", &["text"], "x\0y")]
    #[case("{\"a\": {\"b\": {\"c\": \"x\"}}, \"t\": \"y\"}", &["t", "a.b.c"], "y;x")]
    #[case("{\"a.b\": \"x\", \"a\": {\"b\": \"y\"}}", &["a.b"], "x")]
    #[case("{\"a\": {\"b.c\": \"x\"}}", &["a.b.c"], "x")]
    #[case("{\"text\": [\"one\", \"\", \"two\"]}", &["text"], "one||two")]
    #[case("{\"text\": \"first\", \"text\": \"last\"}", &["text"], "last")]
    fn texts_are_found(#[case] line: &str, #[case] keys: &[&str], #[case] expected: &str) {
        assert_eq!(found(line.as_bytes(), keys).unwrap(), expected);
    }

    #[rstest]
    #[case(b"{\"text\": null}", "text", "field `text` is null, not a string")]
    #[case(
        b"{\"text\": [\"a\", 1]}",
        "text",
        "element 2 of `text` is a number, not a string"
    )]
    #[case(
        b"{\"body\": 1, \"id\": 2}",
        "text",
        "no field `text`, only [body, id]"
    )]
    #[case(b"{\"a\": {\"c\": 2}}", "a.b", "no field `a.b`, only [c]")]
    #[case(b"{\"a\": \"x\"}", "a.b", "field `a` is a string, not an object")]
    #[case(b"[1]", "text", "an array, not an object")]
    #[case(
        b"{\"text\": \"a",
        "text",
        "not valid JSON (EOF while parsing a string at column 11)"
    )]
    #[case(b"{\"text\": \"\x00\"}", "text", "not valid JSON (control character")]
    #[case(b"{\"text\": \"\\ud800\"}", "text", "not valid JSON (")]
    #[case(
        b"{\"text\": \"\xFF\"}",
        "text",
        "not UTF-8: byte 10 of the 13 of the line starts no"
    )]
    fn what_is_wrong_is_named(#[case] line: &[u8], #[case] key: &str, #[case] why: &str) {
        let refusal = found(line, &[key]).unwrap_err();
        assert!(refusal.starts_with(why), "{refusal}");
    }
}
