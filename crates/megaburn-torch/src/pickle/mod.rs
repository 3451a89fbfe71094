//! Pickles, which are read without calling anything, and written.
//!
//! [`Pickle::read`] reads protocols 0 to 5. Where Python would call a class or a function, there is
//! an [`Object`] that names it and holds its arguments. Nothing is imported. The values of a pickle
//! refer to each other by number, so that shared values and cycles stay what they are.
//!
//! A pickle needs memory in proportion to its length: at most some 100 bytes for each of its own.

mod error;
mod input;
mod machine;
mod node;
mod scalar;
mod show;
mod text;
mod tree;
mod value;
mod writer;

pub use error::PickleError;
pub use node::{Global, NodeId};
pub use tree::Tree;
pub use value::{Entries, Kind, Object, Value, Values};
pub(crate) use writer::PickleWriter;
pub use writer::write_pickle;

use machine::{MOST_NODES, Machine};
use node::Node;

/// What a pickle holds.
pub struct Pickle {
    nodes: Vec<Node>,
    root: NodeId,
}

impl std::fmt::Debug for Pickle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Pickle").field(&self.root()).finish()
    }
}

impl Pickle {
    /// Reads bytes that are one pickle.
    ///
    /// # Errors
    /// The bytes are no pickle of protocols 0 to 5, are cut off, or continue after its end. It has
    /// more than 67 million values, or uses the extension registry or out-of-band buffers, which
    /// PyTorch does not.
    pub fn read(bytes: &[u8]) -> Result<Self, PickleError> {
        let (pickle, len) = Self::read_first(bytes)?;
        if len < bytes.len() {
            let num_left = bytes.len() - len;
            let why = format!("{num_left} bytes follow the end of the pickle");
            return Err(PickleError::new(len, why));
        }
        Ok(pickle)
    }

    /// Reads the pickle that bytes begin with; returns its length too.
    ///
    /// # Errors
    /// As for [`Self::read`], without the bytes that follow.
    pub fn read_first(bytes: &[u8]) -> Result<(Self, usize), PickleError> {
        let (nodes, root, len) = Machine::new(bytes, MOST_NODES).run()?;
        Ok((Self { nodes, root }, len))
    }

    /// All references to what is stored outside of the pickle, as [`Kind::Persistent`].
    pub fn persistent(&self) -> impl Iterator<Item = Value<'_>> {
        let nodes = self.nodes.iter().enumerate();
        let found = nodes.filter(|(_, node)| matches!(node, Node::Persistent(_)));
        found.map(|(index, _)| Value::new(&self.nodes, NodeId(index as u32)))
    }

    /// All classes and functions that the pickle names, whether it calls them or not.
    pub fn globals(&self) -> impl Iterator<Item = Global<'_>> {
        let nodes = self.nodes.iter().enumerate();
        let found = nodes.filter(|(_, node)| matches!(node, Node::Global(..)));
        found.filter_map(|(index, _)| Value::new(&self.nodes, NodeId(index as u32)).as_global())
    }

    /// The whole, of which all others are parts.
    pub fn root(&self) -> Value<'_> {
        Value::new(&self.nodes, self.root)
    }
}
