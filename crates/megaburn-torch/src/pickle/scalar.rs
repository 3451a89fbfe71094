use super::error::PickleError;
use super::input::Input;
use super::node::Node;
use super::text;

/// The integer that follows an opcode, or a truth value, which protocol 0 writes as one.
pub(super) fn integer(input: &mut Input, opcode: u8) -> Result<Node, PickleError> {
    Ok(match opcode {
        b'K' => Node::Int(input.u8()?.into()),
        b'M' => Node::Int(input.u16()?.into()),
        b'J' => Node::Int(i32::from_le_bytes(input.array()?).into()),
        0x8a => {
            let len = input.u8()?;
            long(input.take_long(len.into())?)
        }
        0x8b => {
            let len = input.u32()?;
            long(input.take_long(len.into())?)
        }
        _ => {
            let line = input.text_line()?;
            match (opcode, line) {
                (b'I', "01") => return Ok(Node::Bool(true)),
                (b'I', "00") => return Ok(Node::Bool(false)),
                _ => {}
            }
            match text::decimal(line) {
                Some(Ok(value)) => Node::Int(value),
                Some(Err(digits)) => Node::BigInt(digits),
                None => {
                    let shown: String = line.chars().take(40).collect();
                    let why = format!("{shown:?} is no integer of at most 128 bits");
                    return Err(input.error(why));
                }
            }
        }
    })
}

/// An integer in little-endian two's complement.
fn long(digits: &[u8]) -> Node {
    if digits.len() > 8 {
        return Node::BigInt(digits.into());
    }
    let is_negative = digits.last().is_some_and(|last| *last >= 0x80);
    let mut bytes = [if is_negative { 0xff } else { 0 }; 8];
    bytes[..digits.len()].copy_from_slice(digits);
    Node::Int(i64::from_le_bytes(bytes))
}

/// The number with a fraction that follows an opcode.
pub(super) fn float(input: &mut Input, opcode: u8) -> Result<Node, PickleError> {
    if opcode == b'G' {
        return Ok(Node::Float(f64::from_be_bytes(input.array()?)));
    }
    let line = input.text_line()?;
    let value = line.trim_ascii().parse();
    let value = value.map_err(|_| input.error("a number with a fraction is not valid"))?;
    Ok(Node::Float(value))
}

/// The string that follows an opcode.
pub(super) fn string(input: &mut Input, opcode: u8) -> Result<Node, PickleError> {
    let bytes = match opcode {
        b'V' => {
            let text = text::raw_unicode(input.line()?);
            let text = text.ok_or_else(|| input.error("a string has a bad escape"))?;
            return Ok(Node::Str(text.into()));
        }
        b'S' => {
            let found = text::unquoted(input.line()?);
            let found = found.ok_or_else(|| input.error("a string is not quoted"))?;
            return Ok(python_2_string(found));
        }
        b'T' => {
            let len = input.u32()?;
            return Ok(python_2_string(input.take_long(len.into())?.to_vec()));
        }
        b'U' => {
            let len = input.u8()?;
            return Ok(python_2_string(input.take_long(len.into())?.to_vec()));
        }
        0x8c => {
            let len = input.u8()?;
            input.take_long(len.into())?
        }
        b'X' => {
            let len = input.u32()?;
            input.take_long(len.into())?
        }
        _ => {
            let len = input.u64()?;
            input.take_long(len)?
        }
    };
    Ok(Node::Str(input.text(bytes)?.into()))
}

/// A string of Python 2 may be text or bytes.
fn python_2_string(bytes: Vec<u8>) -> Node {
    match String::from_utf8(bytes) {
        Ok(text) => Node::Str(text.into()),
        Err(error) => Node::Bytes(error.into_bytes().into()),
    }
}

/// The bytes that follow an opcode.
pub(super) fn bytes(input: &mut Input, opcode: u8) -> Result<Node, PickleError> {
    let len = match opcode {
        b'C' => input.u8()?.into(),
        b'B' => input.u32()?.into(),
        _ => input.u64()?,
    };
    Ok(Node::Bytes(input.take_long(len)?.into()))
}
