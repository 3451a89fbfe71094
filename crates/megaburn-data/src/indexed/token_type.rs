/// The integer type of the tokens in a `.bin` file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenType {
    /// Unsigned, 1 byte.
    U8,
    /// Signed, 1 byte.
    I8,
    /// Signed, 2 bytes.
    I16,
    /// Signed, 4 bytes.
    I32,
    /// Signed, 8 bytes.
    I64,
    /// Unsigned, 2 bytes.
    U16,
}

impl TokenType {
    /// Every type, with its code in an `.idx` file. Codes 6 and 7 are floating-point numbers, which
    /// are no tokens.
    const CODES: [(u8, Self); 6] = [
        (1, Self::U8),
        (2, Self::I8),
        (3, Self::I16),
        (4, Self::I32),
        (5, Self::I64),
        (8, Self::U16),
    ];

    /// The type that Megatron-LM writes for a vocabulary: 2 bytes below 65500 ids, else 4.
    pub fn for_vocab(vocab_size: usize) -> Self {
        if vocab_size < 65_500 {
            Self::U16
        } else {
            Self::I32
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        let found = Self::CODES.into_iter().find(|(known, _)| *known == code)?;
        Some(found.1)
    }

    pub(crate) fn code(self) -> u8 {
        let mut codes = Self::CODES.into_iter();
        codes
            .find(|(_, own)| *own == self)
            .map_or(0, |(code, _)| code)
    }

    /// Bytes per token.
    pub fn size(self) -> u64 {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// The name of the type in NumPy.
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U16 => "uint16",
        }
    }

    /// The tokens as the bytes of a `.bin` file. The type must be that of the vocabulary, so that
    /// no token is too large for it.
    pub(crate) fn bytes_of(self, tokens: &[u32]) -> Vec<u8> {
        match self.size() {
            1 => tokens.iter().map(|&token| token as u8).collect(),
            2 => tokens
                .iter()
                .flat_map(|&token| (token as u16).to_le_bytes())
                .collect(),
            4 => tokens
                .iter()
                .flat_map(|&token| token.to_le_bytes())
                .collect(),
            _ => tokens
                .iter()
                .flat_map(|&token| u64::from(token).to_le_bytes())
                .collect(),
        }
    }

    /// The tokens in the bytes of a `.bin` file.
    pub(crate) fn tokens_of(self, bytes: &[u8]) -> Vec<i64> {
        let each = bytes.chunks_exact(self.size() as usize);
        each.map(|bytes| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            let value = i64::from_le_bytes(word);
            match self {
                Self::U8 | Self::U16 | Self::I64 => value,
                Self::I8 => value as i8 as i64,
                Self::I16 => value as i16 as i64,
                Self::I32 => value as i32 as i64,
            }
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_from_their_bytes() {
        for (code, of) in TokenType::CODES {
            assert_eq!(TokenType::from_code(code), Some(of));
            assert_eq!(of.code(), code);
            let bytes = of.bytes_of(&[0, 1, 127]);
            assert_eq!(bytes.len() as u64, 3 * of.size());
            assert_eq!(of.tokens_of(&bytes), [0, 1, 127]);
        }
        assert_eq!(TokenType::from_code(7), None, "a floating-point number");
        assert_eq!(TokenType::U16.tokens_of(&[255, 255]), [65_535]);
        assert_eq!(TokenType::I16.tokens_of(&[255, 255]), [-1]);
        assert_eq!(TokenType::I32.tokens_of(&[254, 255, 255, 255]), [-2]);
    }

    #[test]
    fn the_type_is_chosen_as_megatron_does() {
        assert_eq!(TokenType::for_vocab(65_499), TokenType::U16);
        assert_eq!(TokenType::for_vocab(65_500), TokenType::I32);
    }
}
