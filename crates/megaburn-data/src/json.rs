//! Parses JSON records, and says what is wrong with one.

use serde_json::Value;

/// Parses a line that holds one JSON value.
///
/// # Errors
/// The line is not valid JSON; the message names the column.
pub(crate) fn parse_line(line: &str) -> Result<Value, String> {
    serde_json::from_str(line).map_err(|error| {
        if error.line() > 1 {
            return format!("not valid JSON ({error})");
        }
        // A line is parsed alone, so serde's own line number would always be 1.
        let place = format!(" at line {} column {}", error.line(), error.column());
        let what = error.to_string().replace(&place, "");
        format!("not valid JSON ({what} at column {})", error.column())
    })
}

/// The kind of a JSON value, for messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Says that an object has no such field.
pub(crate) fn no_field<'a>(field: &str, fields: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<&str> = fields.map(String::as_str).collect();
    format!("no field `{field}`, only [{}]", names.join(", "))
}
