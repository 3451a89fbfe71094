//! Values as text, close to Python's `repr`, and short enough for a message.

use std::fmt;

use super::value::{Entries, Kind, Value, Values};

/// The deepest value that is written.
const DEEPEST: usize = 8;

/// The most values that are written, of a whole and of its parts together.
const MOST_VALUES: usize = 100;

/// The most characters of a string that are written.
const MOST_CHARS: usize = 60;

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = Shown {
            f,
            num_left: MOST_VALUES,
        };
        shown.value(*self, DEEPEST)
    }
}

impl fmt::Debug for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for Values<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = Shown {
            f,
            num_left: MOST_VALUES,
        };
        shown.sequence(["[", "]"], *self, DEEPEST)
    }
}

impl fmt::Debug for Entries<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = Shown {
            f,
            num_left: MOST_VALUES,
        };
        shown.entries(*self, DEEPEST)
    }
}

struct Shown<'f, 'g> {
    f: &'f mut fmt::Formatter<'g>,
    num_left: usize,
}

impl Shown<'_, '_> {
    fn value(&mut self, value: Value, depth: usize) -> fmt::Result {
        if depth == 0 || self.num_left == 0 {
            return self.f.write_str("...");
        }
        self.num_left -= 1;
        let depth = depth - 1;
        match value.kind() {
            Kind::None => self.f.write_str("None"),
            Kind::Bool(true) => self.f.write_str("True"),
            Kind::Bool(false) => self.f.write_str("False"),
            Kind::Int(value) => write!(self.f, "{value}"),
            Kind::BigInt(digits) => {
                self.f.write_str("0x")?;
                let digits = digits.iter().rev().take(MOST_CHARS);
                digits
                    .into_iter()
                    .try_for_each(|byte| write!(self.f, "{byte:02x}"))
            }
            Kind::Float(value) => write!(self.f, "{value:?}"),
            Kind::Str(text) => {
                let start: String = text.chars().take(MOST_CHARS).collect();
                let end = if start.len() < text.len() { "..." } else { "" };
                write!(self.f, "{start:?}{end}")
            }
            Kind::Bytes(bytes) => write!(self.f, "{} bytes", bytes.len()),
            Kind::List(values) => self.sequence(["[", "]"], values, depth),
            Kind::Tuple(values) => self.sequence(["(", ")"], values, depth),
            Kind::Set(values) => self.sequence(["{", "}"], values, depth),
            Kind::FrozenSet(values) => self.sequence(["frozenset({", "})"], values, depth),
            Kind::Dict(entries) => self.entries(entries, depth),
            Kind::Global(global) => write!(self.f, "{global}"),
            Kind::Persistent(id) => {
                self.f.write_str("persistent ")?;
                self.value(id, depth)
            }
            Kind::Object(object) => {
                self.value(object.callable, depth)?;
                self.sequence(["(", ")"], object.args, depth)?;
                if let Some(kwargs) = object.kwargs {
                    self.f.write_str(" keywords ")?;
                    self.value(kwargs, depth)?;
                }
                if let Some(state) = object.state {
                    self.f.write_str(" state ")?;
                    self.value(state, depth)?;
                }
                if !object.entries.is_empty() {
                    self.f.write_str(" entries ")?;
                    self.entries(object.entries, depth)?;
                }
                if !object.elements.is_empty() {
                    self.f.write_str(" elements ")?;
                    self.sequence(["[", "]"], object.elements, depth)?;
                }
                Ok(())
            }
        }
    }

    fn sequence(&mut self, ends: [&str; 2], values: Values, depth: usize) -> fmt::Result {
        self.f.write_str(ends[0])?;
        for (index, value) in values.iter().enumerate() {
            if !self.comma(index)? {
                break;
            }
            self.value(value, depth)?;
        }
        self.f.write_str(ends[1])
    }

    fn entries(&mut self, entries: Entries, depth: usize) -> fmt::Result {
        self.f.write_str("{")?;
        for (index, (key, value)) in entries.iter().enumerate() {
            if !self.comma(index)? {
                break;
            }
            self.value(key, depth)?;
            self.f.write_str(": ")?;
            self.value(value, depth)?;
        }
        self.f.write_str("}")
    }

    /// Separates elements; `false` if no further one is written.
    fn comma(&mut self, index: usize) -> Result<bool, fmt::Error> {
        if index > 0 {
            self.f.write_str(", ")?;
        }
        if self.num_left == 0 {
            self.f.write_str("...")?;
        }
        Ok(self.num_left > 0)
    }
}
