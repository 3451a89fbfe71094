use super::error::PickleError;
use super::input::Input;
use super::node::{Node, NodeId, ObjectNode};
use super::scalar;

/// The most values of a pickle, each of which takes 32 bytes and up. A pickle has no more values
/// than bytes.
pub(super) const MOST_NODES: usize = 1 << 26;

/// The values that are in every pickle: `None`, `False`, `True`, and the empty tuple.
const NONE: NodeId = NodeId(0);
const FALSE: NodeId = NodeId(1);
const TRUE: NodeId = NodeId(2);
const EMPTY_TUPLE: NodeId = NodeId(3);

/// The small integers that follow them.
const FIRST_SMALL: u32 = 4;
const NUM_SMALL: i64 = 16;

/// Python's pickle machine, without its calls: what would be called becomes an object that says so.
///
/// Source: CPython, Lib/pickletools.py describes all opcodes.
pub(super) struct Machine<'a> {
    input: Input<'a>,
    nodes: Vec<Node>,
    stack: Vec<NodeId>,
    /// The heights of the stack at the marks.
    marks: Vec<usize>,
    memo: Vec<Option<NodeId>>,
    /// The number of values that were memoized without an index.
    num_memoized: usize,
    most_nodes: usize,
    len: usize,
}

impl<'a> Machine<'a> {
    pub(super) fn new(bytes: &'a [u8], most_nodes: usize) -> Self {
        let mut nodes = vec![
            Node::None,
            Node::Bool(false),
            Node::Bool(true),
            Node::Tuple(Box::default()),
        ];
        nodes.extend((0..NUM_SMALL).map(Node::Int));
        Self {
            input: Input::new(bytes),
            most_nodes: most_nodes.saturating_add(nodes.len()),
            nodes,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
            num_memoized: 0,
            len: bytes.len(),
        }
    }

    /// Runs until the pickle ends; returns its values, which of them is the whole, and its length.
    pub(super) fn run(mut self) -> Result<(Vec<Node>, NodeId, usize), PickleError> {
        loop {
            let opcode = self.input.u8()?;
            if opcode == b'.' {
                let root = self.pop()?;
                return Ok((self.nodes, root, self.input.at()));
            }
            self.step(opcode)?;
        }
    }

    fn step(&mut self, opcode: u8) -> Result<(), PickleError> {
        match opcode {
            // Framing and the stack.
            0x80 => match self.input.u8()? {
                0..=5 => {}
                version => return Err(self.error(format!("protocol {version} is unknown"))),
            },
            0x95 => _ = self.input.u64()?,
            b'(' => self.marks.push(self.stack.len()),
            b'0' if self.marks.last() == Some(&self.stack.len()) => _ = self.marks.pop(),
            b'0' => _ = self.pop()?,
            b'1' => _ = self.pop_mark()?,
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            // The memo.
            b'p' | b'q' | b'r' | 0x94 => self.put(opcode)?,
            b'g' | b'h' | b'j' => self.get(opcode)?,
            // Constants.
            b'N' => self.stack.push(NONE),
            0x88 => self.stack.push(TRUE),
            0x89 => self.stack.push(FALSE),
            b')' => self.stack.push(EMPTY_TUPLE),
            // Numbers and strings.
            b'I' | b'L' | b'J' | b'K' | b'M' | 0x8a | 0x8b => {
                let number = scalar::integer(&mut self.input, opcode)?;
                self.push(number)?;
            }
            b'F' | b'G' => {
                let number = scalar::float(&mut self.input, opcode)?;
                self.push(number)?;
            }
            b'S' | b'T' | b'U' | b'V' | b'X' | 0x8c | 0x8d => {
                let text = scalar::string(&mut self.input, opcode)?;
                self.push(text)?;
            }
            b'B' | b'C' | 0x8e | 0x96 => {
                let bytes = scalar::bytes(&mut self.input, opcode)?;
                self.push(bytes)?;
            }
            // Containers.
            b']' => self.push(Node::List(Vec::new()))?,
            b'}' => self.push(Node::Dict(Vec::new()))?,
            0x8f => self.push(Node::Set(Vec::new()))?,
            b'l' => {
                let elements = self.pop_mark()?;
                self.push(Node::List(elements))?;
            }
            b't' => {
                let elements = self.pop_mark()?;
                self.push_tuple(elements)?;
            }
            0x85..=0x87 => {
                let len = usize::from(opcode - 0x84);
                let elements = self.pop_many(len)?;
                self.push_tuple(elements)?;
            }
            b'd' => {
                let entries = self.pop_entries()?;
                self.push(Node::Dict(entries))?;
            }
            0x91 => {
                let elements = self.pop_mark()?;
                self.push(Node::FrozenSet(elements.into()))?;
            }
            b'a' => {
                let element = self.pop()?;
                self.append(vec![element])?;
            }
            b'e' => {
                let elements = self.pop_mark()?;
                self.append(elements)?;
            }
            0x90 => {
                let elements = self.pop_mark()?;
                self.add_to_set(elements)?;
            }
            b's' => {
                let entry = self.pop_many(2)?;
                self.set_entries(pairs(&entry))?;
            }
            b'u' => {
                let entries = self.pop_entries()?;
                self.set_entries(entries)?;
            }
            // Names, objects and references to what is outside of the pickle.
            b'c' => self.push_global()?,
            0x93 => self.stack_global()?,
            b'R' | 0x81 | 0x92 | b'i' | b'o' => self.object(opcode)?,
            b'b' => self.build()?,
            b'P' => {
                let id = self.input.text_line()?;
                self.push(Node::Str(id.into()))?;
                let id = self.pop()?;
                self.push(Node::Persistent(id))?;
            }
            b'Q' => {
                let id = self.pop()?;
                self.push(Node::Persistent(id))?;
            }
            0x82..=0x84 => return Err(self.error("it uses the extension registry")),
            0x97 | 0x98 => return Err(self.error("it has out-of-band buffers")),
            _ => return Err(self.error(format!("{opcode:#04x} is no opcode"))),
        }
        Ok(())
    }

    fn put(&mut self, opcode: u8) -> Result<(), PickleError> {
        let index = match opcode {
            0x94 => self.num_memoized,
            _ => self.memo_index(opcode)?,
        };
        // Pickles number their values from 0, so an index beyond the length is damage.
        if index > self.len {
            return Err(self.error(format!("it numbers a value {index}")));
        }
        let top = self.top()?;
        if index >= self.memo.len() {
            self.memo.resize(index + 1, None);
        }
        let place = &mut self.memo[index];
        self.num_memoized += usize::from(place.is_none());
        *place = Some(top);
        Ok(())
    }

    fn get(&mut self, opcode: u8) -> Result<(), PickleError> {
        let index = match opcode {
            b'g' => self.memo_index(b'p')?,
            b'h' => self.memo_index(b'q')?,
            _ => self.memo_index(b'r')?,
        };
        let found = self.memo.get(index).copied().flatten();
        let found = found.ok_or_else(|| self.error(format!("no value has the number {index}")))?;
        self.stack.push(found);
        Ok(())
    }

    fn memo_index(&mut self, opcode: u8) -> Result<usize, PickleError> {
        Ok(match opcode {
            b'p' => {
                let line = self.input.text_line()?;
                let index = line.trim_ascii().parse();
                index.map_err(|_| self.error(format!("{line:?} is no number of a value")))?
            }
            b'q' => self.input.u8()?.into(),
            _ => self.input.u32()? as usize,
        })
    }

    fn push_tuple(&mut self, elements: Vec<NodeId>) -> Result<(), PickleError> {
        if elements.is_empty() {
            self.stack.push(EMPTY_TUPLE);
            return Ok(());
        }
        self.push(Node::Tuple(elements.into()))
    }

    fn append(&mut self, mut added: Vec<NodeId>) -> Result<(), PickleError> {
        let top = self.top()?;
        match &mut self.nodes[top.0 as usize] {
            Node::List(elements) => elements.append(&mut added),
            Node::Object(object) => object.elements.append(&mut added),
            _ => return Err(self.error("it appends to a value that is no list")),
        }
        Ok(())
    }

    fn add_to_set(&mut self, mut added: Vec<NodeId>) -> Result<(), PickleError> {
        let top = self.top()?;
        match &mut self.nodes[top.0 as usize] {
            Node::Set(elements) => elements.append(&mut added),
            _ => return Err(self.error("it adds to a value that is no set")),
        }
        Ok(())
    }

    fn set_entries(&mut self, mut added: Vec<(NodeId, NodeId)>) -> Result<(), PickleError> {
        let top = self.top()?;
        match &mut self.nodes[top.0 as usize] {
            Node::Dict(entries) => entries.append(&mut added),
            Node::Object(object) => object.entries.append(&mut added),
            _ => return Err(self.error("it sets entries of a value that is no dict")),
        }
        Ok(())
    }

    /// Pushes a name from the two lines that follow.
    fn push_global(&mut self) -> Result<(), PickleError> {
        let module = self.input.text_line()?;
        let name = self.input.text_line()?;
        self.push(Node::Str(module.into()))?;
        self.push(Node::Str(name.into()))?;
        self.stack_global()
    }

    fn stack_global(&mut self) -> Result<(), PickleError> {
        let names = self.pop_many(2)?;
        let is_text = |id: &NodeId| matches!(self.nodes[id.0 as usize], Node::Str(_));
        if !names.iter().all(is_text) {
            return Err(self.error("the name of a class is no string"));
        }
        self.push(Node::Global(names[0], names[1]))
    }

    fn object(&mut self, opcode: u8) -> Result<(), PickleError> {
        let mut kwargs = None;
        let (callable, args) = match opcode {
            b'i' => {
                let args = self.pop_mark()?;
                self.push_global()?;
                let callable = self.pop()?;
                self.push_tuple(args)?;
                (callable, self.pop()?)
            }
            b'o' => {
                let parts = self.pop_mark()?;
                let Some((callable, args)) = parts.split_first() else {
                    return Err(self.error("an object has no class"));
                };
                self.push_tuple(args.to_vec())?;
                (*callable, self.pop()?)
            }
            _ => {
                if opcode == 0x92 {
                    kwargs = Some(self.pop()?);
                }
                let parts = self.pop_many(2)?;
                (parts[0], parts[1])
            }
        };
        if !matches!(self.nodes[args.0 as usize], Node::Tuple(_)) {
            return Err(self.error("the arguments of an object are no tuple"));
        }
        self.push(Node::Object(Box::new(ObjectNode {
            callable,
            args,
            kwargs,
            state: None,
            entries: Vec::new(),
            elements: Vec::new(),
        })))
    }

    fn build(&mut self) -> Result<(), PickleError> {
        let state = self.pop()?;
        let top = self.top()?;
        let why = match &mut self.nodes[top.0 as usize] {
            Node::Object(object) if object.state.is_some() => {
                "it sets the state of an object twice"
            }
            Node::Object(object) => {
                object.state = Some(state);
                return Ok(());
            }
            _ => "it sets the state of a value that is no object",
        };
        Err(self.error(why))
    }

    fn push(&mut self, node: Node) -> Result<(), PickleError> {
        let existing = match node {
            Node::Bool(value) => Some(if value { TRUE } else { FALSE }),
            Node::Int(value @ 0..NUM_SMALL) => Some(NodeId(FIRST_SMALL + value as u32)),
            _ => None,
        };
        if let Some(existing) = existing {
            self.stack.push(existing);
            return Ok(());
        }
        if self.nodes.len() >= self.most_nodes {
            return Err(self.error("it has too many values"));
        }
        let id = u32::try_from(self.nodes.len());
        let id = id.map_err(|_| self.error("it has too many values"))?;
        self.nodes.push(node);
        self.stack.push(NodeId(id));
        Ok(())
    }

    /// The height of the stack above the last mark.
    fn height(&self) -> usize {
        self.stack.len() - self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<NodeId, PickleError> {
        let top = self.stack.last().copied().filter(|_| self.height() > 0);
        top.ok_or_else(|| self.error("it uses a value that is not there"))
    }

    fn pop(&mut self) -> Result<NodeId, PickleError> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_many(&mut self, len: usize) -> Result<Vec<NodeId>, PickleError> {
        if self.height() < len {
            return Err(self.error("it uses a value that is not there"));
        }
        Ok(self.stack.split_off(self.stack.len() - len))
    }

    /// Takes what is above the last mark, and the mark.
    fn pop_mark(&mut self) -> Result<Vec<NodeId>, PickleError> {
        let mark = self.marks.pop();
        let mark = mark.ok_or_else(|| self.error("it uses a mark that is not there"))?;
        Ok(self.stack.split_off(mark))
    }

    fn pop_entries(&mut self) -> Result<Vec<(NodeId, NodeId)>, PickleError> {
        let values = self.pop_mark()?;
        if values.len() % 2 == 1 {
            return Err(self.error("an entry of a dict has no value"));
        }
        Ok(pairs(&values))
    }

    fn error(&self, why: impl Into<String>) -> PickleError {
        self.input.error(why)
    }
}

fn pairs(values: &[NodeId]) -> Vec<(NodeId, NodeId)> {
    let pairs = values.chunks_exact(2).map(|pair| (pair[0], pair[1]));
    pairs.collect()
}
