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
    let mut writer = Writer {
        out: vec![0x80, 2],
        memo: HashMap::new(),
        bad_name: None,
    };
    writer.tree(tree);
    writer.out.push(b'.');
    match writer.bad_name {
        Some(error) => Err(error),
        None => Ok(writer.out),
    }
}

struct Writer<'a> {
    out: Vec<u8>,
    memo: HashMap<Memoized<'a>, u32>,
    bad_name: Option<PickleError>,
}

#[derive(PartialEq, Eq, Hash)]
enum Memoized<'a> {
    Str(&'a str),
    Global(&'a str, &'a str),
}

impl<'a> Writer<'a> {
    fn tree(&mut self, tree: &'a Tree) {
        match tree {
            Tree::None => self.out.push(b'N'),
            Tree::Bool(value) => self.out.push(if *value { 0x88 } else { 0x89 }),
            Tree::Int(value) => self.int(*value),
            Tree::Float(value) => {
                self.out.push(b'G');
                self.out.extend(value.to_be_bytes());
            }
            Tree::Str(text) => self.memoized(Memoized::Str(text), |out| string(out, text)),
            Tree::Bytes(bytes) => self.bytes(bytes),
            Tree::List(elements) => {
                self.out.push(b']');
                self.marked(elements, b'e');
            }
            Tree::Tuple(elements) => self.tuple(elements),
            Tree::Dict(entries) => {
                self.out.push(b'}');
                self.out.push(b'(');
                for (key, value) in entries {
                    self.tree(key);
                    self.tree(value);
                }
                self.out.push(b'u');
            }
            Tree::Global(module, name) => self.global(module, name),
            Tree::Call { callable, args } => {
                self.tree(callable);
                self.tuple(args);
                self.out.push(b'R');
            }
            Tree::Object { class, state } => {
                self.tree(class);
                self.out.extend([b')', 0x81]);
                if let Some(state) = state {
                    self.tree(state);
                    self.out.push(b'b');
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
        self.memoized(Memoized::Str("latin1"), |out| string(out, "latin1"));
        self.out.extend([0x86, b'R']);
    }

    fn tuple(&mut self, elements: &'a [Tree]) {
        match elements.len() {
            0 => self.out.push(b')'),
            len @ 1..=3 => {
                elements.iter().for_each(|element| self.tree(element));
                self.out.push(0x84 + len as u8);
            }
            _ => self.marked(elements, b't'),
        }
    }

    fn marked(&mut self, elements: &'a [Tree], opcode: u8) {
        self.out.push(b'(');
        elements.iter().for_each(|element| self.tree(element));
        self.out.push(opcode);
    }

    fn global(&mut self, module: &'a str, name: &'a str) {
        if module.contains('\n') || name.contains('\n') {
            let why = format!(
                "the name `{}.{}` has a line break",
                module.escape_debug(),
                name.escape_debug()
            );
            self.bad_name = Some(PickleError::new(self.out.len(), why));
        }
        self.memoized(Memoized::Global(module, name), |out| {
            // Protocol 2 has the names of Python 2.
            let module = match module {
                "builtins" => "__builtin__",
                "copyreg" => "copy_reg",
                other => other,
            };
            out.extend(format!("c{module}\n{name}\n").bytes());
        });
    }

    fn memoized(&mut self, value: Memoized<'a>, write: impl FnOnce(&mut Vec<u8>)) {
        if let Some(index) = self.memo.get(&value) {
            self.out.push(b'j');
            self.out.extend(index.to_le_bytes());
            return;
        }
        write(&mut self.out);
        let index = self.memo.len() as u32;
        self.out.push(b'r');
        self.out.extend(index.to_le_bytes());
        self.memo.insert(value, index);
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
