//! Cuts a JSON array into its elements, which are not parsed: one that is damaged does not hinder the
//! others.

use std::io::{self, BufRead};

/// The elements of an array that is read.
pub(super) struct Elements<R> {
    reader: R,
    num_read: u64,
    is_ended: bool,
}

/// Why an element cannot be read.
#[derive(Debug)]
pub(super) enum ArrayError {
    Io(io::Error),
    /// The text is no array.
    Bad(String),
}

impl From<io::Error> for ArrayError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl<R: BufRead> Elements<R> {
    /// The elements of a text whose first character, after whitespace, is `[`.
    pub(super) fn begin(mut reader: R) -> Result<Self, ArrayError> {
        loop {
            match next_byte(&mut reader)? {
                Some(b'[') => break,
                Some(byte) if byte.is_ascii_whitespace() => {}
                _ => return Err(ArrayError::Bad("it does not begin with `[`".into())),
            }
        }
        Ok(Self {
            reader,
            num_read: 0,
            is_ended: false,
        })
    }

    /// The next element; `None` at the end of the text.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>, ArrayError> {
        if self.is_ended {
            return Ok(None);
        }
        let mut element = Vec::new();
        let end = read_element(&mut self.reader, &mut element)?;
        self.is_ended = end == b']';
        if self.is_ended {
            self.check_end()?;
        }
        if element.trim_ascii().is_empty() {
            if self.is_ended && self.num_read == 0 {
                return Ok(None);
            }
            let number = self.num_read + 1;
            return Err(ArrayError::Bad(format!("element {number} is missing")));
        }
        self.num_read += 1;
        Ok(Some(element))
    }

    fn check_end(&mut self) -> Result<(), ArrayError> {
        while let Some(byte) = next_byte(&mut self.reader)? {
            if !byte.is_ascii_whitespace() {
                return Err(ArrayError::Bad("trailing characters after its end".into()));
            }
        }
        Ok(())
    }
}

/// Reads up to the comma or bracket after an element, which is returned.
fn read_element(reader: &mut impl BufRead, element: &mut Vec<u8>) -> Result<u8, ArrayError> {
    let (mut depth, mut is_string, mut is_escaped) = (0usize, false, false);
    while let Some(byte) = next_byte(reader)? {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_string => is_escaped = true,
            b'"' => is_string = !is_string,
            _ if is_string => {}
            b'[' | b'{' => depth += 1,
            b',' | b']' if depth == 0 => return Ok(byte),
            b'}' if depth == 0 => return Err(ArrayError::Bad("`}` closes nothing".into())),
            b']' | b'}' => depth -= 1,
            _ => {}
        }
        element.push(byte);
    }
    Err(ArrayError::Bad("EOF before its end".into()))
}

fn next_byte(reader: &mut impl BufRead) -> io::Result<Option<u8>> {
    let next = reader.fill_buf()?.first().copied();
    reader.consume(usize::from(next.is_some()));
    Ok(next)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn elements(text: &str) -> Result<Vec<String>, String> {
        let all = || {
            let mut elements = Elements::begin(text.as_bytes())?;
            let mut found = Vec::new();
            while let Some(element) = elements.next()? {
                found.push(String::from_utf8(element).unwrap().trim().to_string());
            }
            Ok(found)
        };
        all().map_err(|error| match error {
            ArrayError::Bad(why) => why,
            ArrayError::Io(error) => error.to_string(),
        })
    }

    #[rstest]
    #[case(" [] ", &[])]
    #[case("[1]", &["1"])]
    #[case("\n[ {\"a\": [1, 2], \"b\": {}} ,\n\"x,]\", [[]] ]\n", &["{\"a\": [1, 2], \"b\": {}}", "\"x,]\"", "[[]]"])]
    #[case(r#"["\"]", "\\", 2]"#, &[r#""\"]""#, r#""\\""#, "2"])]
    #[case("[bad, 1]", &["bad", "1"])]
    fn elements_are_cut_at_their_commas(#[case] text: &str, #[case] expected: &[&str]) {
        assert_eq!(elements(text).unwrap(), expected);
    }

    #[rstest]
    #[case("[1, ", "EOF")]
    #[case("[1", "EOF")]
    #[case("[\"a]", "EOF")]
    #[case("[1] 2", "trailing")]
    #[case("[1,]", "element 2 is missing")]
    #[case("[,1]", "element 1 is missing")]
    #[case("[1}]", "closes nothing")]
    fn what_is_no_array_is_refused(#[case] text: &str, #[case] why: &str) {
        let refusal = elements(text).unwrap_err();
        assert!(refusal.contains(why), "{refusal}");
    }
}
