use std::str::from_utf8;

use super::wire::{Field, Fields};

/// A SentencePiece model as its file says.
#[derive(Clone, Debug)]
pub(in super::super) struct SentencePieceModel {
    pub(in super::super) pieces: Vec<Piece>,
    pub(in super::super) model_type: ModelType,
    /// Whether characters without a token are encoded as the tokens of their bytes.
    pub(in super::super) byte_fallback: bool,
    /// Whether spaces belong to the word before them.
    pub(in super::super) space_is_suffix: bool,
    /// The ids of the tokens that start, end and pad a text; negative if there is none.
    pub(in super::super) bos: i32,
    pub(in super::super) eos: i32,
    pub(in super::super) pad: i32,
    /// The text of unknown parts.
    pub(in super::super) unknown_text: String,
    pub(in super::super) normalizer: NormalizerSpec,
}

/// One token.
#[derive(Clone, Debug)]
pub(in super::super) struct Piece {
    pub(in super::super) text: String,
    pub(in super::super) score: f32,
    pub(in super::super) kind: Kind,
}

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum ModelType {
    Unigram,
    Bpe,
}

/// How a text is changed before it is encoded.
#[derive(Clone, Debug)]
pub(in super::super) struct NormalizerSpec {
    /// A map of strings to strings.
    pub(in super::super) charsmap: Vec<u8>,
    pub(in super::super) add_dummy_prefix: bool,
    pub(in super::super) remove_extra_spaces: bool,
    pub(in super::super) escape_spaces: bool,
}

impl SentencePieceModel {
    /// Every file begins with this byte, the key of its first token.
    pub(in super::super) const FIRST_BYTE: u8 = 0x0A;

    /// Parses the content of a file.
    ///
    /// # Errors
    /// They say what is wrong with the file.
    pub(in super::super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut model = Self {
            pieces: Vec::new(),
            model_type: ModelType::Unigram,
            byte_fallback: false,
            space_is_suffix: false,
            bos: 1,
            eos: 2,
            pad: -1,
            unknown_text: " \u{2047} ".into(),
            normalizer: NormalizerSpec {
                charsmap: Vec::new(),
                add_dummy_prefix: true,
                remove_extra_spaces: true,
                escape_spaces: true,
            },
        };
        let mut has_specs = [false; 2];
        let mut fields = Fields::new(bytes, 0);
        while let Some(field) = fields.next()? {
            match field {
                (1, Field::Bytes(bytes, at)) => {
                    let id = model.pieces.len();
                    let piece =
                        Piece::parse(bytes, at).map_err(|why| format!("token {id}: {why}"))?;
                    model.pieces.push(piece);
                }
                (2, Field::Bytes(bytes, at)) => {
                    model.trainer_spec(bytes, at)?;
                    has_specs[0] = true;
                }
                (3, Field::Bytes(bytes, at)) => {
                    model.normalizer.parse(bytes, at)?;
                    has_specs[1] = true;
                }
                (5, Field::Bytes(bytes, at)) if has_charsmap(bytes, at)? => {
                    return Err(
                        "it changes decoded texts (denormalizer_spec), which is not supported"
                            .into(),
                    );
                }
                _ => {}
            }
        }
        match has_specs {
            [true, true] => Ok(model),
            _ => Err(
                "it has no trainer_spec and normalizer_spec after its tokens: the file was cut, \
                or is no SentencePiece model"
                    .into(),
            ),
        }
    }

    fn trainer_spec(&mut self, bytes: &[u8], at: usize) -> Result<(), String> {
        let mut fields = Fields::new(bytes, at);
        while let Some(field) = fields.next()? {
            match field {
                (3, Field::Integer(1)) => self.model_type = ModelType::Unigram,
                (3, Field::Integer(2)) => self.model_type = ModelType::Bpe,
                (3, Field::Integer(other)) => {
                    return Err(format!(
                        "its model type is {other}; unigram (1) and BPE (2) are supported"
                    ));
                }
                (24, Field::Integer(value)) => self.space_is_suffix = value != 0,
                (35, Field::Integer(value)) => self.byte_fallback = value != 0,
                (41, Field::Integer(value)) => self.bos = value as i32,
                (42, Field::Integer(value)) => self.eos = value as i32,
                (43, Field::Integer(value)) => self.pad = value as i32,
                (44, Field::Bytes(bytes, at)) => self.unknown_text = text(bytes, at)?,
                _ => {}
            }
        }
        Ok(())
    }
}

impl NormalizerSpec {
    fn parse(&mut self, bytes: &[u8], at: usize) -> Result<(), String> {
        let mut fields = Fields::new(bytes, at);
        while let Some(field) = fields.next()? {
            match field {
                (2, Field::Bytes(bytes, _)) => self.charsmap = bytes.into(),
                (3, Field::Integer(value)) => self.add_dummy_prefix = value != 0,
                (4, Field::Integer(value)) => self.remove_extra_spaces = value != 0,
                (5, Field::Integer(value)) => self.escape_spaces = value != 0,
                _ => {}
            }
        }
        Ok(())
    }
}

impl Piece {
    fn parse(bytes: &[u8], at: usize) -> Result<Self, String> {
        let mut piece = Self {
            text: String::new(),
            score: 0.0,
            kind: Kind::Normal,
        };
        let mut fields = Fields::new(bytes, at);
        while let Some(field) = fields.next()? {
            match field {
                (1, Field::Bytes(bytes, at)) => piece.text = text(bytes, at)?,
                // The sum makes a negative zero equal to zero.
                (2, Field::Float(score)) if score.is_finite() => piece.score = score + 0.0,
                (2, Field::Float(score)) => return Err(format!("its score is {score}")),
                (3, Field::Integer(kind)) => {
                    piece.kind = match kind {
                        1 => Kind::Normal,
                        2 => Kind::Unknown,
                        3 => Kind::Control,
                        4 => Kind::UserDefined,
                        5 => Kind::Unused,
                        6 => Kind::Byte,
                        other => return Err(format!("its type {other} is unknown")),
                    }
                }
                _ => {}
            }
        }
        if piece.text.is_empty() {
            return Err("it is empty".into());
        }
        Ok(piece)
    }

    /// The byte of a token that stands for a byte, like `<0x0A>`.
    pub(in super::super) fn byte(&self) -> Option<u8> {
        byte(&self.text)
    }
}

/// The byte that a token like `<0x0A>` stands for.
pub(super) fn byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_hex = |c: u8| c.is_ascii_digit() || (b'A'..=b'F').contains(&c);
    if digits.len() != 2 || !digits.bytes().all(is_hex) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

fn has_charsmap(bytes: &[u8], at: usize) -> Result<bool, String> {
    let mut fields = Fields::new(bytes, at);
    while let Some(field) = fields.next()? {
        if let (2, Field::Bytes(map, _)) = field
            && !map.is_empty()
        {
            return Ok(true);
        }
    }
    Ok(false)
}

fn text(bytes: &[u8], at: usize) -> Result<String, String> {
    match from_utf8(bytes) {
        Ok(text) => Ok(text.into()),
        Err(error) => Err(format!("byte {} is not UTF-8", at + error.valid_up_to())),
    }
}
