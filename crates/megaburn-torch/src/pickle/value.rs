use std::borrow::Cow;

use super::node::{Global, Node, NodeId};

/// A value of a [`Pickle`](super::Pickle), to which it points.
#[derive(Clone, Copy)]
pub struct Value<'a> {
    nodes: &'a [Node],
    id: NodeId,
}

/// What a [`Value`] is.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Kind<'a> {
    /// Python's `None`.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer of at most 64 bits.
    Int(i64),
    /// A larger integer, as little-endian two's complement.
    BigInt(&'a [u8]),
    /// A number with a fraction.
    Float(f64),
    /// A string.
    Str(&'a str),
    /// A `bytes` or `bytearray`.
    Bytes(&'a [u8]),
    /// A list.
    List(Values<'a>),
    /// A tuple.
    Tuple(Values<'a>),
    /// A set.
    Set(Values<'a>),
    /// A frozen set.
    FrozenSet(Values<'a>),
    /// A dict.
    Dict(Entries<'a>),
    /// A class or function.
    Global(Global<'a>),
    /// An object that Python would make by a call.
    Object(Object<'a>),
    /// A reference to what is stored outside of the pickle.
    Persistent(Value<'a>),
}

/// An object, as the calls that Python would make it by. Nothing is called.
#[derive(Clone, Copy, Debug)]
pub struct Object<'a> {
    /// The class or function that would be called, which is mostly a [`Kind::Global`].
    pub callable: Value<'a>,
    /// The positional arguments.
    pub args: Values<'a>,
    /// The keyword arguments, a dict.
    pub kwargs: Option<Value<'a>>,
    /// What `__setstate__` would be given, mostly the dict of its attributes.
    pub state: Option<Value<'a>>,
    /// What would be set by keys, such as the entries of an `OrderedDict`.
    pub entries: Entries<'a>,
    /// What would be appended.
    pub elements: Values<'a>,
}

/// Several values in order.
#[derive(Clone, Copy)]
pub struct Values<'a> {
    nodes: &'a [Node],
    ids: &'a [NodeId],
}

/// Pairs of keys and values in the order in which they were set. A key may be there twice; the last
/// one counts.
#[derive(Clone, Copy)]
pub struct Entries<'a> {
    nodes: &'a [Node],
    ids: &'a [(NodeId, NodeId)],
}

impl<'a> Values<'a> {
    /// The number of values.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The value with a number, counted from 0.
    pub fn get(&self, index: usize) -> Option<Value<'a>> {
        let id = *self.ids.get(index)?;
        Some(Value {
            nodes: self.nodes,
            id,
        })
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Value<'a>> + use<'a> {
        let nodes = self.nodes;
        self.ids.iter().map(move |id| Value { nodes, id: *id })
    }
}

impl<'a> Entries<'a> {
    /// The number of entries.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (Value<'a>, Value<'a>)> + use<'a> {
        let nodes = self.nodes;
        let value = move |id| Value { nodes, id };
        self.ids
            .iter()
            .map(move |(key, of)| (value(*key), value(*of)))
    }

    /// The value of a key that is a string.
    pub fn get(&self, name: &str) -> Option<Value<'a>> {
        let mut entries = self.iter().rev();
        entries.find_map(|(key, value)| (key.as_str() == Some(name)).then_some(value))
    }
}

impl<'a> Value<'a> {
    pub(super) fn new(nodes: &'a [Node], id: NodeId) -> Self {
        Self { nodes, id }
    }

    /// Which object it is: equal for values that are one object in Python.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// What it is.
    pub fn kind(&self) -> Kind<'a> {
        let nodes = self.nodes;
        let value = |id| Value { nodes, id };
        let values = |ids| Values { nodes, ids };
        match &nodes[self.id.0 as usize] {
            Node::None => Kind::None,
            Node::Bool(value) => Kind::Bool(*value),
            Node::Int(value) => Kind::Int(*value),
            Node::BigInt(digits) => Kind::BigInt(digits),
            Node::Float(value) => Kind::Float(*value),
            Node::Str(text) => Kind::Str(text),
            Node::Bytes(bytes) => Kind::Bytes(bytes),
            Node::List(ids) => Kind::List(values(ids)),
            Node::Tuple(ids) => Kind::Tuple(values(ids)),
            Node::Set(ids) => Kind::Set(values(ids)),
            Node::FrozenSet(ids) => Kind::FrozenSet(values(ids)),
            Node::Dict(ids) => Kind::Dict(Entries { nodes, ids }),
            Node::Global(module, name) => {
                // Protocols 0 to 2 have the names of Python 2.
                let module = match value(*module).as_str().unwrap_or_default() {
                    "__builtin__" => "builtins",
                    "copy_reg" => "copyreg",
                    other => other,
                };
                let name = value(*name).as_str().unwrap_or_default();
                Kind::Global(Global { module, name })
            }
            Node::Persistent(id) => Kind::Persistent(value(*id)),
            Node::Object(object) => Kind::Object(Object {
                callable: value(object.callable),
                args: value(object.args).sequence().unwrap_or(values(&[])),
                kwargs: object.kwargs.map(value),
                state: object.state.map(value),
                entries: Entries {
                    nodes,
                    ids: &object.entries,
                },
                elements: values(&object.elements),
            }),
        }
    }

    /// Whether it is `None`.
    pub fn is_none(&self) -> bool {
        matches!(self.kind(), Kind::None)
    }

    /// The truth value.
    pub fn as_bool(&self) -> Option<bool> {
        match self.kind() {
            Kind::Bool(value) => Some(value),
            _ => None,
        }
    }

    /// The integer, if it has at most 64 bits.
    pub fn as_i64(&self) -> Option<i64> {
        match self.kind() {
            Kind::Int(value) => Some(value),
            _ => None,
        }
    }

    /// The integer, if it is a size.
    pub fn as_usize(&self) -> Option<usize> {
        usize::try_from(self.as_i64()?).ok()
    }

    /// The number, of either kind.
    pub fn as_f64(&self) -> Option<f64> {
        match self.kind() {
            Kind::Float(value) => Some(value),
            Kind::Int(value) => Some(value as f64),
            _ => None,
        }
    }

    /// The string.
    pub fn as_str(&self) -> Option<&'a str> {
        match self.kind() {
            Kind::Str(text) => Some(text),
            _ => None,
        }
    }

    /// The class or function.
    pub fn as_global(&self) -> Option<Global<'a>> {
        match self.kind() {
            Kind::Global(global) => Some(global),
            _ => None,
        }
    }

    /// The object.
    pub fn as_object(&self) -> Option<Object<'a>> {
        match self.kind() {
            Kind::Object(object) => Some(object),
            _ => None,
        }
    }

    /// What is called to make the object.
    pub fn class(&self) -> Option<Global<'a>> {
        self.as_object()?.callable.as_global()
    }

    /// The bytes, in one of the forms of all protocols.
    pub fn as_bytes(&self) -> Option<Cow<'a, [u8]>> {
        if let Kind::Bytes(bytes) = self.kind() {
            return Some(Cow::Borrowed(bytes));
        }
        let object = self.as_object()?;
        let class = object.callable.as_global()?;
        let first = object.args.get(0);
        if class.is("builtins", "bytearray") || class.is("builtins", "bytes") {
            // A bytearray of protocol 2 has bytes in their own form.
            return match first.map(|first| first.kind()) {
                Some(Kind::Bytes(bytes)) => Some(Cow::Borrowed(bytes)),
                Some(Kind::Object(inner)) => inner.encoded_bytes().map(Cow::Owned),
                Some(Kind::Str(text)) => latin_1(text).map(Cow::Owned),
                None => Some(Cow::Borrowed(&[])),
                _ => None,
            };
        }
        object.encoded_bytes().map(Cow::Owned)
    }

    /// The elements of a list, a tuple, a set or a `torch.Size`.
    pub fn sequence(&self) -> Option<Values<'a>> {
        match self.kind() {
            Kind::List(values) | Kind::Tuple(values) => Some(values),
            Kind::Set(values) | Kind::FrozenSet(values) => Some(values),
            Kind::Object(object) => {
                let class = object.callable.as_global()?;
                let sets = ["set", "frozenset"];
                let is_set = class.module == "builtins" && sets.contains(&class.name);
                if !is_set && !class.is("torch", "Size") {
                    return None;
                }
                match object.args.get(0)?.kind() {
                    Kind::List(values) | Kind::Tuple(values) => Some(values),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// The entries of a dict, an `OrderedDict` or a `defaultdict`.
    pub fn entries(&self) -> Option<Entries<'a>> {
        match self.kind() {
            Kind::Dict(entries) => Some(entries),
            Kind::Object(object) => {
                let class = object.callable.as_global()?;
                let dicts = ["OrderedDict", "defaultdict", "Counter"];
                let is_dict = class.module == "collections" && dicts.contains(&class.name);
                is_dict.then_some(object.entries)
            }
            _ => None,
        }
    }

    /// The value of a key of a dict.
    pub fn get(&self, name: &str) -> Option<Value<'a>> {
        self.entries()?.get(name)
    }

    /// An attribute of an object.
    pub fn attribute(&self, name: &str) -> Option<Value<'a>> {
        let state = self.as_object()?.state?;
        let parts = match state.kind() {
            // The attributes of `__dict__`, and those of `__slots__`.
            Kind::Tuple(parts) if parts.len() == 2 => [parts.get(1), parts.get(0)],
            _ => [Some(state), None],
        };
        let mut dicts = parts.into_iter().flatten();
        dicts.find_map(|dict| dict.get(name))
    }
}

impl Object<'_> {
    /// The bytes of `_codecs.encode(text, "latin1")`, which is how protocols 0 to 2 write bytes.
    fn encoded_bytes(&self) -> Option<Vec<u8>> {
        let callable = self.callable.as_global()?;
        let codec = self.args.get(1)?.as_str()?;
        let is_latin = callable.is("_codecs", "encode") && matches!(codec, "latin1" | "latin-1");
        latin_1(self.args.get(0)?.as_str().filter(|_| is_latin)?)
    }
}

fn latin_1(text: &str) -> Option<Vec<u8>> {
    text.chars()
        .map(|c| u8::try_from(u32::from(c)).ok())
        .collect()
}
