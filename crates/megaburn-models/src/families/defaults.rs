use serde_json::Value;

/// What a key of `config.json` means that has no value there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Meaning {
    /// No value: what is made of it follows from other keys, or the key must be given.
    Nothing,
    /// A whole number.
    Size(usize),
    /// A number.
    Number(f64),
    /// True or false.
    Flag(bool),
    /// A text.
    Text(&'static str),
}

/// What the configuration class of a family in Transformers means by an optional key, where the key
/// is absent and where it is null.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeyDefault {
    pub(super) key: &'static str,
    pub(super) absent: Meaning,
    pub(super) null: Meaning,
}

impl KeyDefault {
    /// A key of which null means the same as its absence. The classes of today refuse null for most
    /// of these.
    pub(super) const fn same(key: &'static str, meaning: Meaning) -> Self {
        Self {
            key,
            absent: meaning,
            null: meaning,
        }
    }

    /// A key that null leaves without a value.
    pub(super) const fn or_nothing(key: &'static str, absent: Meaning) -> Self {
        Self {
            key,
            absent,
            null: Meaning::Nothing,
        }
    }

    /// A flag that null switches off: the model only asks whether it is true.
    pub(super) const fn or_false(key: &'static str, absent: bool) -> Self {
        Self {
            key,
            absent: Meaning::Flag(absent),
            null: Meaning::Flag(false),
        }
    }
}

impl Meaning {
    /// The same as a value of `config.json`; null where there is none.
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
