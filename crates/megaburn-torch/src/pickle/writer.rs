use std::collections::HashMap;

use super::error::PickleError;
use super::tree::Tree;

/// Writes a value as a pickle of protocol 2, which all versions of PyTorch read.
///
/// Names and strings are written once each, and referred to by the memo.
///
/// # Errors
/// The name of a class or function has a line break, after which Python would read something else.
pub fn write_pickle(tree: &Tree) -> Result<Vec<u8>, PickleError> {
    let mut writer = PickleWriter::new();
    writer.tree(tree);
    writer.finish()
}

/// Writes a pickle piece by piece, for what is too large to be a [`Tree`] of its own.
#[derive(Debug)]
pub(crate) struct PickleWriter {
    out: Vec<u8>,
    /// The numbers of strings, and of names by their modules.
    strings: HashMap<Box<str>, u32>,
    globals: HashMap<Box<str>, HashMap<Box<str>, u32>>,
    num_memoized: u32,
    bad_name: Option<PickleError>,
}

impl PickleWriter {
    pub(crate) fn new() -> Self {
        Self {
            out: vec![0x80, 2],
            strings: HashMap::new(),
            globals: HashMap::new(),
            num_memoized: 0,
            bad_name: None,
        }
    }

    /// Ends the pickle, of which exactly one value was written.
    pub(crate) fn finish(mut self) -> Result<Vec<u8>, PickleError> {
        self.out.push(b'.');
        match self.bad_name {
            Some(error) => Err(error),
            None => Ok(self.out),
        }
    }

    /// Begins an object of a class, whose state follows.
    pub(crate) fn begin_object(&mut self, class: &Tree) {
        self.tree(class);
        self.out.extend([b')', 0x81]);
    }

    /// Ends an object after its state.
    pub(crate) fn end_object(&mut self) {
        self.out.push(b'b');
    }

    /// Begins a dict, whose keys and values follow.
    pub(crate) fn begin_dict(&mut self) {
        self.out.extend(*b"}(");
    }

    /// Ends a dict.
    pub(crate) fn end_dict(&mut self) {
        self.out.push(b'u');
    }

    /// Begins a list, whose elements follow.
    pub(crate) fn begin_list(&mut self) {
        self.out.extend(*b"](");
    }

    /// Ends a list.
    pub(crate) fn end_list(&mut self) {
        self.out.push(b'e');
    }

    /// Writes a value.
    pub(crate) fn tree(&mut self, tree: &Tree) {
        match tree {
            Tree::None => self.out.push(b'N'),
            Tree::Bool(value) => self.out.push(if *value { 0x88 } else { 0x89 }),
            Tree::Int(value) => self.int(*value),
            Tree::Float(value) => {
                self.out.push(b'G');
                self.out.extend(value.to_be_bytes());
            }
            Tree::Str(text) => self.string(text),
            Tree::Bytes(bytes) => self.bytes(bytes),
            Tree::List(elements) => {
                self.begin_list();
                elements.iter().for_each(|element| self.tree(element));
                self.end_list();
            }
            Tree::Tuple(elements) => self.tuple(elements),
            Tree::Dict(entries) => {
                self.begin_dict();
                for (key, value) in entries {
                    self.tree(key);
                    self.tree(value);
                }
                self.end_dict();
            }
            Tree::Global(module, name) => self.global(module, name),
            Tree::Call { callable, args } => {
                self.tree(callable);
                self.tuple(args);
                self.out.push(b'R');
            }
            Tree::Object { class, state } => {
                self.begin_object(class);
                if let Some(state) = state {
                    self.tree(state);
                    self.end_object();
                }
            }
            Tree::Persistent(id) => {
                self.tree(id);
                self.out.push(b'Q');
            }
        }
    }

    fn int(&mut self, value: i64) {
        if let Ok(value) = u8::try_from(value) {
            self.out.extend([b'K', value]);
        } else if let Ok(value) = i32::try_from(value) {
            self.out.push(b'J');
            self.out.extend(value.to_le_bytes());
        } else {
            self.out.extend([0x8a, 8]);
            self.out.extend(value.to_le_bytes());
        }
    }

    /// Protocol 2 has no bytes: they are the Latin-1 encoding of a string.
    fn bytes(&mut self, bytes: &[u8]) {
        self.global("_codecs", "encode");
        let text: String = bytes.iter().map(|byte| char::from(*byte)).collect();
        string(&mut self.out, &text);
        self.string("latin1");
        self.out.extend([0x86, b'R']);
    }

    fn tuple(&mut self, elements: &[Tree]) {
        match elements.len() {
            0 => self.out.push(b')'),
            len @ 1..=3 => {
                elements.iter().for_each(|element| self.tree(element));
                self.out.push(0x84 + len as u8);
            }
            _ => {
                self.out.push(b'(');
                elements.iter().for_each(|element| self.tree(element));
                self.out.push(b't');
            }
        }
    }

    fn global(&mut self, module: &str, name: &str) {
        if module.contains('\n') || name.contains('\n') {
            let [module, name] = [module, name].map(str::escape_debug);
            let why = format!("the name `{module}.{name}` has a line break");
            self.bad_name = Some(PickleError::new(self.out.len(), why));
        }
        let known = self.globals.get(module).and_then(|names| names.get(name));
        if let Some(index) = known {
            return self.get(*index);
        }
        // Protocol 2 has the names of Python 2.
        let written = match module {
            "builtins" => "__builtin__",
            "copyreg" => "copy_reg",
            other => other,
        };
        self.out.extend(format!("c{written}\n{name}\n").bytes());
        let index = self.put();
        let names = self.globals.entry(module.into()).or_default();
        names.insert(name.into(), index);
    }

    fn string(&mut self, text: &str) {
        if let Some(index) = self.strings.get(text) {
            return self.get(*index);
        }
        string(&mut self.out, text);
        let index = self.put();
        self.strings.insert(text.into(), index);
    }

    /// Refers to a value that was numbered.
    fn get(&mut self, index: u32) {
        self.out.push(b'j');
        self.out.extend(index.to_le_bytes());
    }

    /// Numbers the value that was just written.
    fn put(&mut self) -> u32 {
        let index = self.num_memoized;
        self.out.push(b'r');
        self.out.extend(index.to_le_bytes());
        self.num_memoized += 1;
        index
    }
}

/// Writes a string; one of 4 GiB and more, which protocol 2 cannot hold, as protocol 4 does.
fn string(out: &mut Vec<u8>, text: &str) {
    match u32::try_from(text.len()) {
        Ok(len) => {
            out.push(b'X');
            out.extend(len.to_le_bytes());
        }
        Err(_) => {
            out.push(0x8d);
            out.extend((text.len() as u64).to_le_bytes());
        }
    }
    out.extend(text.as_bytes());
}
