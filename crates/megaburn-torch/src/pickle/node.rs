use std::fmt;

/// The place of a value in its [`Pickle`](super::Pickle).
///
/// Two places with the same number are the same Python object, which a pickle refers to by its
/// memo.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(super) u32);

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// The name of a class or function, which is never imported or called.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Global<'a> {
    /// The module, such as `torch._utils`.
    pub module: &'a str,
    /// The name in it, such as `_rebuild_tensor_v2`.
    pub name: &'a str,
}

impl Global<'_> {
    /// Whether it is this name of this module.
    pub fn is(&self, module: &str, name: &str) -> bool {
        self.module == module && self.name == name
    }
}

impl fmt::Display for Global<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.module, self.name)
    }
}

/// A value of a pickle. Its parts are other nodes, so that shared values are stored once and cycles
/// are possible.
#[derive(Debug)]
pub(super) enum Node {
    None,
    Bool(bool),
    Int(i64),
    /// An integer beyond 64 bits, as little-endian two's complement.
    BigInt(Box<[u8]>),
    Float(f64),
    Str(Box<str>),
    Bytes(Box<[u8]>),
    List(Vec<NodeId>),
    Tuple(Box<[NodeId]>),
    Dict(Vec<(NodeId, NodeId)>),
    Set(Vec<NodeId>),
    FrozenSet(Box<[NodeId]>),
    /// A module and a name in it, both of which are strings.
    Global(NodeId, NodeId),
    Object(Box<ObjectNode>),
    Persistent(NodeId),
}

/// What a pickle says about an object: what would be called with what, and what would be set then.
#[derive(Debug)]
pub(super) struct ObjectNode {
    pub(super) callable: NodeId,
    pub(super) args: NodeId,
    pub(super) kwargs: Option<NodeId>,
    pub(super) state: Option<NodeId>,
    pub(super) entries: Vec<(NodeId, NodeId)>,
    pub(super) elements: Vec<NodeId>,
}
