//! Messages in the wire format of Protocol Buffers, which the files of TensorBoard and of Weights &
//! Biases consist of.
//!
//! Source: <https://protobuf.dev/programming-guides/encoding>.

/// An encoded message. Fields are written in the order of the calls.
#[derive(Clone, Debug, Default)]
pub(super) struct Message(Vec<u8>);

impl Message {
    /// Adds a field of type `int64`, `uint64`, `bool` or of an enumeration.
    pub(super) fn varint(mut self, field: u32, value: u64) -> Self {
        self.key(field, 0);
        self.push_varint(value);
        self
    }

    /// Adds a `double`.
    pub(super) fn double(mut self, field: u32, value: f64) -> Self {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Adds a `float`.
    pub(super) fn float(mut self, field: u32, value: f32) -> Self {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Adds a `string`.
    pub(super) fn string(mut self, field: u32, text: &str) -> Self {
        self.delimited(field, text.as_bytes());
        self
    }

    /// Adds a message.
    pub(super) fn message(mut self, field: u32, inner: &Self) -> Self {
        self.delimited(field, &inner.0);
        self
    }

    /// The encoded bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn delimited(&mut self, field: u32, bytes: &[u8]) {
        self.key(field, 2);
        self.push_varint(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn key(&mut self, field: u32, wire_type: u32) {
        self.push_varint(u64::from((field << 3) | wire_type));
    }

    fn push_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of the encoding's description.
    #[test]
    fn messages_are_encoded_as_documented() {
        let of = |message: Message| message.bytes().to_vec();
        assert_eq!(of(Message::default().varint(1, 150)), [0x08, 0x96, 0x01]);
        let text = Message::default().string(2, "testing");
        assert_eq!(of(text), b"\x12\x07testing");
        let inner = Message::default().varint(1, 150);
        let outer = Message::default().message(3, &inner);
        assert_eq!(of(outer), [0x1a, 0x03, 0x08, 0x96, 0x01]);
        let far = Message::default().varint(200, u64::MAX);
        assert_eq!(of(far)[..3], [0xc0, 0x0c, 0xff]);
        assert_eq!(
            of(Message::default().float(5, 1.0)),
            [0x2d, 0, 0, 0x80, 0x3f]
        );
        let double = Message::default().double(1, 1.0);
        assert_eq!(of(double), [0x09, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f]);
    }
}
