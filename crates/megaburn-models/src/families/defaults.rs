use serde_json::Value;

/// The meaning of a key of `config.json` that has no value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Meaning {
    /// No value: it follows from other keys, or the key is required.
    Nothing,
    /// An integer.
    Size(usize),
    /// A number.
    Number(f64),
    /// A boolean.
    Flag(bool),
    /// A string.
    Text(&'static str),
}

/// The meaning of an optional key in the configuration class of a family in Transformers, if the
/// key is absent and if it is null.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeyDefault {
    pub(super) key: &'static str,
    pub(super) absent: Meaning,
    pub(super) null: Meaning,
}

impl KeyDefault {
    /// A key for which null means the same as absence. Today's classes refuse null for most of
    /// these keys.
    pub const fn same(key: &'static str, meaning: Meaning) -> Self {
        Self {
            key,
            absent: meaning,
            null: meaning,
        }
    }

    /// A key that has no value if it is null.
    pub const fn or_nothing(key: &'static str, absent: Meaning) -> Self {
        Self {
            key,
            absent,
            null: Meaning::Nothing,
        }
    }

    /// A flag that null switches off, because the model only tests whether it is true.
    pub const fn or_false(key: &'static str, absent: bool) -> Self {
        Self {
            key,
            absent: Meaning::Flag(absent),
            null: Meaning::Flag(false),
        }
    }
}

impl Meaning {
    /// The meaning as a value of `config.json`; null for no value.
    pub(super) fn to_json(self) -> Value {
        match self {
            Self::Nothing => Value::Null,
            Self::Size(size) => size.into(),
            Self::Number(number) => number.into(),
            Self::Flag(flag) => flag.into(),
            Self::Text(text) => text.into(),
        }
    }
}
