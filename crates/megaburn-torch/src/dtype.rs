use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The type of a tensor's elements, by PyTorch's names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum DType {
    /// `float64`.
    F64,
    /// `float32`.
    F32,
    /// `float16`.
    F16,
    /// `bfloat16`.
    BF16,
    /// `float8_e4m3fn`.
    F8E4M3,
    /// `float8_e5m2`.
    F8E5M2,
    /// `float8_e4m3fnuz`.
    F8E4M3Fnuz,
    /// `float8_e5m2fnuz`.
    F8E5M2Fnuz,
    /// `float8_e8m0fnu`.
    F8E8M0,
    /// `int64`.
    I64,
    /// `int32`.
    I32,
    /// `int16`.
    I16,
    /// `int8`.
    I8,
    /// `uint64`.
    U64,
    /// `uint32`.
    U32,
    /// `uint16`.
    U16,
    /// `uint8`.
    U8,
    /// `bool`, of one byte.
    Bool,
    /// `complex32`, two `float16`.
    C32,
    /// `complex64`, two `float32`.
    C64,
    /// `complex128`, two `float64`.
    C128,
}

/// Each type with its name, the bytes of an element, and the class of its storages. The types that
/// came last have storages without a type.
const TYPES: [(DType, &str, usize, Option<&str>); 21] = [
    (DType::F64, "float64", 8, Some("DoubleStorage")),
    (DType::F32, "float32", 4, Some("FloatStorage")),
    (DType::F16, "float16", 2, Some("HalfStorage")),
    (DType::BF16, "bfloat16", 2, Some("BFloat16Storage")),
    (DType::F8E4M3, "float8_e4m3fn", 1, None),
    (DType::F8E5M2, "float8_e5m2", 1, None),
    (DType::F8E4M3Fnuz, "float8_e4m3fnuz", 1, None),
    (DType::F8E5M2Fnuz, "float8_e5m2fnuz", 1, None),
    (DType::F8E8M0, "float8_e8m0fnu", 1, None),
    (DType::I64, "int64", 8, Some("LongStorage")),
    (DType::I32, "int32", 4, Some("IntStorage")),
    (DType::I16, "int16", 2, Some("ShortStorage")),
    (DType::I8, "int8", 1, Some("CharStorage")),
    (DType::U64, "uint64", 8, None),
    (DType::U32, "uint32", 4, None),
    (DType::U16, "uint16", 2, None),
    (DType::U8, "uint8", 1, Some("ByteStorage")),
    (DType::Bool, "bool", 1, Some("BoolStorage")),
    (DType::C32, "complex32", 4, None),
    (DType::C64, "complex64", 8, Some("ComplexFloatStorage")),
    (DType::C128, "complex128", 16, Some("ComplexDoubleStorage")),
];

impl DType {
    /// The name in PyTorch, such as `bfloat16`.
    pub fn name(self) -> &'static str {
        TYPES[self as usize].1
    }

    /// The bytes of an element.
    pub fn num_bytes(self) -> usize {
        TYPES[self as usize].2
    }

    /// The type of a name in PyTorch, without `torch.`.
    pub fn from_name(name: &str) -> Option<Self> {
        // PyTorch has second names for some.
        let name = match name {
            "double" => "float64",
            "float" => "float32",
            "half" => "float16",
            "long" => "int64",
            "int" => "int32",
            "short" => "int16",
            other => other,
        };
        let mut types = TYPES.into_iter();
        types.find_map(|(dtype, of, ..)| (of == name).then_some(dtype))
    }

    /// The class of its storages, in the module `torch`.
    pub(crate) fn storage_class(self) -> Option<&'static str> {
        TYPES[self as usize].3
    }

    /// The type of a class of storages in the module `torch`.
    pub(crate) fn from_storage_class(name: &str) -> Option<Self> {
        let mut types = TYPES.into_iter();
        types.find_map(|(dtype, .., class)| (class == Some(name)).then_some(dtype))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for DType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for DType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let dtype = Self::from_name(&name);
        dtype.ok_or_else(|| de::Error::custom(format!("`{name}` is no type of elements")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_types() {
        for (index, (dtype, name, num_bytes, class)) in TYPES.into_iter().enumerate() {
            assert_eq!(dtype as usize, index);
            assert_eq!((dtype.name(), dtype.num_bytes()), (name, num_bytes));
            assert_eq!(DType::from_name(name), Some(dtype));
            if let Some(class) = class {
                assert_eq!(DType::from_storage_class(class), Some(dtype));
            }
        }
        assert_eq!(DType::from_name("qint8"), None);
        assert_eq!(DType::from_name("half"), Some(DType::F16));
    }
}
