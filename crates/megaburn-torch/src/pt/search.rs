use std::collections::HashSet;

use crate::pickle::{Kind, NodeId, Value};
use crate::pt::tensor::{StoredTensor, tensor_of};

/// How deep tensors are looked for.
const DEEPEST: usize = 64;

/// The most tensors that are found, and the most bytes of their names. One tensor may be found many
/// times: a file of a few bytes may have it in a list twice, that list in another twice, and on.
const MOST_TENSORS: usize = 1 << 18;
const MOST_NAME_BYTES: usize = 1 << 28;

/// An error about the tensor of a name, as text.
type NamedError = (String, String);

/// Looks for tensors in nested dicts and lists; returns each with its dotted name.
pub(super) fn find_tensors(root: Value) -> Result<Vec<(String, StoredTensor)>, NamedError> {
    let mut search = Search {
        found: Vec::new(),
        num_name_bytes: 0,
        path: Vec::new(),
        open: Vec::new(),
        without: HashSet::new(),
    };
    search.visit(root)?;
    Ok(search.found)
}

/// A part of a name.
enum Part<'a> {
    Index(usize),
    Key(Value<'a>),
}

struct Search<'a> {
    found: Vec<(String, StoredTensor)>,
    num_name_bytes: usize,
    path: Vec<Part<'a>>,
    /// The containers that are being visited: a cycle ends at one of them.
    open: Vec<NodeId>,
    /// Those without tensors, which are not visited again.
    without: HashSet<NodeId>,
}

impl<'a> Search<'a> {
    fn visit(&mut self, value: Value<'a>) -> Result<(), NamedError> {
        if let Some(tensor) = tensor_of(value) {
            let name = self.name();
            match tensor {
                Ok(tensor) => self.add(name, tensor)?,
                Err(why) => return Err((name, why)),
            }
            return Ok(());
        }
        let elements = match value.kind() {
            Kind::List(elements) | Kind::Tuple(elements) => Some(elements),
            _ => None,
        };
        let entries = value.entries();
        let is_known = self.open.contains(&value.id()) || self.without.contains(&value.id());
        if is_known || (elements.is_none() && entries.is_none()) {
            return Ok(());
        }
        if self.open.len() == DEEPEST {
            return Err((self.name(), "it is nested too deeply".into()));
        }
        let num_before = self.found.len();
        self.open.push(value.id());
        for (index, element) in elements.iter().flat_map(|all| all.iter()).enumerate() {
            self.visit_part(Part::Index(index), element)?;
        }
        for (key, element) in entries.iter().flat_map(|all| all.iter()) {
            self.visit_part(Part::Key(key), element)?;
        }
        self.open.pop();
        if self.found.len() == num_before {
            self.without.insert(value.id());
        }
        Ok(())
    }

    fn visit_part(&mut self, part: Part<'a>, value: Value<'a>) -> Result<(), NamedError> {
        self.path.push(part);
        self.visit(value)?;
        self.path.pop();
        Ok(())
    }

    fn add(&mut self, name: String, tensor: StoredTensor) -> Result<(), NamedError> {
        self.num_name_bytes += name.len();
        if self.found.len() == MOST_TENSORS || self.num_name_bytes > MOST_NAME_BYTES {
            return Err((name, "the file has too many tensors".into()));
        }
        self.found.push((name, tensor));
        Ok(())
    }

    fn name(&self) -> String {
        let parts = self.path.iter().map(|part| match part {
            Part::Index(index) => index.to_string(),
            Part::Key(key) => match key.as_str() {
                Some(key) => key.into(),
                None => key.to_string(),
            },
        });
        parts.collect::<Vec<String>>().join(".")
    }
}
