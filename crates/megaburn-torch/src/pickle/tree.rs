use super::value::{Kind, Value};

/// The deepest value that is copied.
const DEEPEST: usize = 64;

/// A value to write as a pickle.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Tree {
    /// Python's `None`.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A number with a fraction.
    Float(f64),
    /// A string.
    Str(String),
    /// A `bytes`.
    Bytes(Vec<u8>),
    /// A list.
    List(Vec<Tree>),
    /// A tuple.
    Tuple(Vec<Tree>),
    /// A dict.
    Dict(Vec<(Tree, Tree)>),
    /// A class or function, by its module and its name in it.
    Global(String, String),
    /// The result of a call.
    Call {
        /// What is called.
        callable: Box<Tree>,
        /// Its arguments.
        args: Vec<Tree>,
    },
    /// An object of a class that is made without arguments, and then given a state.
    Object {
        /// The class.
        class: Box<Tree>,
        /// Its attributes, a dict, or what its `__setstate__` takes.
        state: Option<Box<Tree>>,
    },
    /// A reference to what is stored outside of the pickle.
    Persistent(Box<Tree>),
}

impl Tree {
    /// A class or function.
    pub fn global(module: &str, name: &str) -> Self {
        Self::Global(module.into(), name.into())
    }

    /// The result of a call.
    pub fn call(callable: Self, args: Vec<Self>) -> Self {
        Self::Call {
            callable: Box::new(callable),
            args,
        }
    }

    /// An object with attributes.
    pub fn object(class: Self, attributes: impl IntoIterator<Item = (&'static str, Self)>) -> Self {
        let entries = attributes
            .into_iter()
            .map(|(name, value)| (name.into(), value));
        Self::Object {
            class: Box::new(class),
            state: Some(Box::new(Self::Dict(entries.collect()))),
        }
    }

    /// Copies a value that was read, such as the arguments of a run, to write it again.
    ///
    /// Returns `None` if it has what a tree cannot hold: a cycle or a depth of more than 64, an
    /// integer beyond 64 bits, a set, or an object that is made in another way. What is shared in
    /// it is copied several times, as at most `most_values` values.
    pub fn copy_of(value: Value, most_values: usize) -> Option<Self> {
        let mut num_left = most_values;
        copied(value, DEEPEST, &mut num_left)
    }
}

impl From<&str> for Tree {
    fn from(text: &str) -> Self {
        Self::Str(text.into())
    }
}

impl From<i64> for Tree {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<bool> for Tree {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<f64> for Tree {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

fn copied(value: Value, depth: usize, num_left: &mut usize) -> Option<Tree> {
    let depth = depth.checked_sub(1)?;
    *num_left = num_left.checked_sub(1)?;
    let mut copy = |value| copied(value, depth, num_left);
    if let Some(bytes) = value.as_bytes() {
        return Some(Tree::Bytes(bytes.into_owned()));
    }
    Some(match value.kind() {
        Kind::None => Tree::None,
        Kind::Bool(value) => Tree::Bool(value),
        Kind::Int(value) => Tree::Int(value),
        Kind::Float(value) => Tree::Float(value),
        Kind::Str(text) => Tree::Str(text.into()),
        Kind::List(values) => Tree::List(values.iter().map(copy).collect::<Option<_>>()?),
        Kind::Tuple(values) => Tree::Tuple(values.iter().map(copy).collect::<Option<_>>()?),
        Kind::Dict(entries) => {
            let mut copies = Vec::new();
            for (key, value) in entries.iter() {
                copies.push((copy(key)?, copy(value)?));
            }
            Tree::Dict(copies)
        }
        Kind::Global(global) => Tree::global(global.module, global.name),
        Kind::Persistent(id) => Tree::Persistent(Box::new(copy(id)?)),
        Kind::Object(object) => {
            let is_plain =
                object.kwargs.is_none() && object.entries.is_empty() && object.elements.is_empty();
            let callable = Box::new(copy(object.callable)?);
            match object.state {
                _ if !is_plain => return None,
                None => Tree::Call {
                    callable,
                    args: object.args.iter().map(copy).collect::<Option<_>>()?,
                },
                Some(state) if object.args.is_empty() => Tree::Object {
                    class: callable,
                    state: Some(Box::new(copy(state)?)),
                },
                Some(_) => return None,
            }
        }
        _ => return None,
    })
}
