//! The text forms of protocol 0: numbers in decimal digits, and strings with escapes.

/// Reads a string as Python's `repr` writes it, with its quotes.
pub(super) fn unquoted(line: &[u8]) -> Option<Vec<u8>> {
    let line = line.trim_ascii_end();
    let (quote, rest) = line.split_first()?;
    let (end, inside) = rest.split_last()?;
    if quote != end || !matches!(quote, b'"' | b'\'') {
        return None;
    }
    let mut found = Vec::with_capacity(inside.len());
    let mut rest = inside;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        if *byte != b'\\' {
            found.push(*byte);
            continue;
        }
        let (escape, after) = rest.split_first()?;
        rest = after;
        match escape {
            b'n' => found.push(b'\n'),
            b'r' => found.push(b'\r'),
            b't' => found.push(b'\t'),
            b'\\' | b'\'' | b'"' => found.push(*escape),
            b'x' => {
                let (digits, after) = rest.split_at_checked(2)?;
                rest = after;
                found.push(hex(digits).and_then(|value| u8::try_from(value).ok())?);
            }
            _ => return None,
        }
    }
    Some(found)
}

/// Reads a string in Python's `raw-unicode-escape`: Latin-1 with `\uXXXX` and `\UXXXXXXXX`.
pub(super) fn raw_unicode(line: &[u8]) -> Option<String> {
    let mut found = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((byte, after)) = rest.split_first() {
        let num_digits = match (byte, after.first()) {
            (b'\\', Some(b'u')) => 4,
            (b'\\', Some(b'U')) => 8,
            _ => {
                found.push(char::from(*byte));
                rest = after;
                continue;
            }
        };
        let (digits, after) = after.get(1..)?.split_at_checked(num_digits)?;
        rest = after;
        found.push(char::from_u32(hex(digits)?)?);
    }
    Some(found)
}

fn hex(digits: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(digits).ok()?;
    let are_digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    are_digits.then(|| u32::from_str_radix(text, 16).ok())?
}

/// Reads decimal digits: 64 bits, or up to 128 bits as little-endian two's complement.
pub(super) fn decimal(text: &str) -> Option<Result<i64, Box<[u8]>>> {
    let text = text.trim_ascii();
    let text = text.strip_suffix('L').unwrap_or(text);
    if let Ok(small) = text.parse() {
        return Some(Ok(small));
    }
    let large: i128 = text.parse().ok()?;
    Some(Err(large.to_le_bytes().into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_undone() {
        assert_eq!(unquoted(b"'a\\n\\x00\\'\\\\'\r").unwrap(), b"a\n\0'\\");
        for bad in [
            "", "'", "'a", "a'", "'a\"", "'\\q'", "'\\x+1'", "'\\x1'", "'\\'",
        ] {
            assert_eq!(unquoted(bad.as_bytes()), None, "{bad}");
        }
        let text = raw_unicode(b"gr\xf6\\u20ac\\U0001f600\\n").unwrap();
        assert_eq!(text, "gr\u{f6}\u{20ac}\u{1f600}\\n");
        for bad in ["\\u12", "\\ud800", "\\U00110000", "\\u+123"] {
            assert_eq!(raw_unicode(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn digits_become_numbers() {
        assert_eq!(decimal("-12L"), Some(Ok(-12)));
        let large = Err((1i128 << 64).to_le_bytes().into());
        assert_eq!(decimal("18446744073709551616L"), Some(large));
        assert_eq!(decimal("12x"), None);
        assert_eq!(decimal(&"9".repeat(60)), None);
    }
}
