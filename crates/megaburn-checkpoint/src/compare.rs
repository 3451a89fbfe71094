use std::{cmp::Ordering, iter, ops::Range};

use burn::tensor::{DType, TensorData, bf16, f16};

use crate::{
    error::CheckpointError,
    source::{TensorHeader, TensorSource},
    values::for_each_batch,
};

/// Bytes of a tensor that are read at once.
const BLOCK: usize = 16 << 20;
/// Elements per comparison chunk; elements are compared one by one only if the bytes of their chunk
/// differ.
const COMPARE_CHUNK: usize = 4096;

/// One tensor in two sources.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorComparison {
    /// The tensor's name.
    pub name: String,
    /// The tensor in the first source; `None` if it is absent there.
    pub a: Option<TensorHeader>,
    /// The tensor in the second source; `None` if it is absent there.
    pub b: Option<TensorHeader>,
    /// How the values differ; `None` if the shapes differ or one source lacks the tensor.
    pub values: Option<ValueDifference>,
}

/// How the values of two tensors of the same shape differ.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueDifference {
    /// Whether the element types and all bits are equal.
    pub bitwise_equal: bool,
    /// Number of elements whose values differ. Zeros of both signs are equal, and so are all NaNs.
    pub num_different: u64,
    /// Number of elements whose values differ by more than the [`Tolerance`].
    pub num_beyond: u64,
    /// The largest absolute difference; infinite if only one of two values is NaN.
    pub max_abs: f64,
    /// The index of the first element with the largest difference; `None` if no value differs.
    pub at: Option<Vec<usize>>,
    /// The index of the first element whose value differs; `None` if no value differs.
    pub first: Option<Vec<usize>>,
    /// The L2 norm of the difference, divided by the norm of the finite values of the first tensor;
    /// 0 if no value differs, and infinite if that norm is 0 or `max_abs` is infinite.
    pub relative_norm: f64,
}

/// The largest difference at which two values `a` and `b` count as close:
/// `|a - b| <= atol + rtol * |b|`, as in `torch.allclose`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tolerance {
    /// Factor of the absolute value in the second source.
    pub rtol: f64,
    /// Absolute difference.
    pub atol: f64,
}

impl Tolerance {
    /// Whether two values that differ by `abs` are close, where `b` is the absolute value of the
    /// second. An infinite difference never is.
    fn accepts(&self, abs: f64, b: f64) -> bool {
        abs == 0.0 || (abs.is_finite() && abs <= self.atol + self.rtol * b)
    }
}

/// The result of [`compare`], by tensor names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Number of tensors in either source.
    pub num_tensors: usize,
    /// Tensors that only the first source has.
    pub only_in_a: Vec<String>,
    /// Tensors that only the second source has.
    pub only_in_b: Vec<String>,
    /// Tensors in both with different shapes; their values are not compared.
    pub shapes_differ: Vec<String>,
    /// Tensors in both with different element types; their values are compared.
    pub dtypes_differ: Vec<String>,
    /// Tensors of equal shape in which at least one value differs.
    pub values_differ: Vec<String>,
    /// Number of tensors of equal shape and element type in which all bits are equal.
    pub num_bitwise_equal: usize,
    /// The largest absolute difference in any tensor.
    pub max_abs: f64,
    /// The first tensor with that difference; `None` if no value differs.
    pub worst: Option<String>,
}

impl Comparison {
    /// Whether both sources have the same tensors, bit for bit.
    pub fn is_identical(&self) -> bool {
        self.num_bitwise_equal == self.num_tensors
    }
}

/// Compares two sources tensor by tensor in name order, and calls `visit` for each tensor. Of each
/// source, a block of rows of about 16 MiB (or a single row, if that is larger) is in memory.
///
/// # Errors
/// One of the sources cannot be read.
pub fn compare(
    a: &dyn TensorSource,
    b: &dyn TensorSource,
    visit: impl FnMut(&TensorComparison),
) -> Result<Comparison, CheckpointError> {
    compare_within(a, b, Tolerance::default(), visit)
}

/// Like [`compare`], and counts the elements that are not close by this tolerance.
///
/// # Errors
/// As [`compare`].
pub fn compare_within(
    a: &dyn TensorSource,
    b: &dyn TensorSource,
    tolerance: Tolerance,
    mut visit: impl FnMut(&TensorComparison),
) -> Result<Comparison, CheckpointError> {
    let mut found = Comparison::default();
    for (header_a, header_b) in pairs(a.headers(), b.headers()) {
        let name = header_a
            .as_ref()
            .or(header_b.as_ref())
            .expect("one of the two is present")
            .name
            .clone();
        let values = match (&header_a, &header_b) {
            (Some(of_a), Some(of_b)) if of_a.shape == of_b.shape => {
                Some(values((a, of_a), (b, of_b), tolerance)?)
            }
            _ => None,
        };
        let tensor = TensorComparison {
            name,
            a: header_a,
            b: header_b,
            values,
        };
        found.count(&tensor);
        visit(&tensor);
    }
    Ok(found)
}

impl Comparison {
    fn count(&mut self, TensorComparison { name, a, b, values }: &TensorComparison) {
        self.num_tensors += 1;
        match (a, b) {
            (Some(_), None) => self.only_in_a.push(name.clone()),
            (None, Some(_)) => self.only_in_b.push(name.clone()),
            (Some(a), Some(b)) => {
                if a.dtype != b.dtype {
                    self.dtypes_differ.push(name.clone());
                }
                if a.shape != b.shape {
                    self.shapes_differ.push(name.clone());
                }
            }
            (None, None) => {}
        }
        let Some(values) = values else { return };
        self.num_bitwise_equal += usize::from(values.bitwise_equal);
        if values.num_different > 0 {
            self.values_differ.push(name.clone());
        }
        if values.max_abs > self.max_abs {
            self.max_abs = values.max_abs;
            self.worst = Some(name.clone());
        }
    }
}

/// Merges two lists that are sorted by name into pairs.
fn pairs(
    a: Vec<TensorHeader>,
    b: Vec<TensorHeader>,
) -> impl Iterator<Item = (Option<TensorHeader>, Option<TensorHeader>)> {
    let mut a = a.into_iter().peekable();
    let mut b = b.into_iter().peekable();
    iter::from_fn(move || {
        let order = match (a.peek(), b.peek()) {
            (None, None) => return None,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(a), Some(b)) => a.name.cmp(&b.name),
        };
        Some((
            (order != Ordering::Greater).then(|| a.next()).flatten(),
            (order != Ordering::Less).then(|| b.next()).flatten(),
        ))
    })
}

type Side<'a> = (&'a dyn TensorSource, &'a TensorHeader);

fn values(
    a: Side<'_>,
    b: Side<'_>,
    tolerance: Tolerance,
) -> Result<ValueDifference, CheckpointError> {
    let header = a.1;
    let row = a.1.row_len();
    let mut found = BlockDifference::new(header.dtype == b.1.dtype, tolerance);
    for Range { start, end } in header.blocks(BLOCK) {
        let of_a = a.0.read_rows(&header.name, start..end)?;
        let of_b = b.0.read_rows(&header.name, start..end)?;
        found.look_at(&of_a, &of_b, start * row);
    }
    let at_index = |at: Option<usize>| at.map(|at| index(at, &header.shape));
    Ok(ValueDifference {
        bitwise_equal: found.equal,
        num_different: found.num,
        num_beyond: found.num_beyond,
        max_abs: found.max_abs,
        at: at_index(found.at),
        first: at_index(found.first),
        relative_norm: match found.num {
            0 => 0.0,
            _ => (found.squares / found.squares_of_a).sqrt(),
        },
    })
}

struct BlockDifference {
    tolerance: Tolerance,
    equal: bool,
    num: u64,
    num_beyond: u64,
    max_abs: f64,
    at: Option<usize>,
    first: Option<usize>,
    /// The sum of the squared differences.
    squares: f64,
    /// The sum of the squares of the first tensor's finite values.
    squares_of_a: f64,
}

impl BlockDifference {
    fn new(has_same_type: bool, tolerance: Tolerance) -> Self {
        Self {
            tolerance,
            equal: has_same_type,
            num: 0,
            num_beyond: 0,
            max_abs: 0.0,
            at: None,
            first: None,
            squares: 0.0,
            squares_of_a: 0.0,
        }
    }

    /// Compares blocks whose first element has number `start`.
    fn look_at(&mut self, a: &TensorData, b: &TensorData, start: usize) {
        let type_a = a.dtype();
        let type_b = b.dtype();
        let difference = difference(type_a, type_b);
        let size_a = type_a.size();
        let size_b = type_b.size();
        for_each_batch(type_a, a.as_bytes(), |values| {
            let finite = values.iter().filter(|value| value.is_finite());
            self.squares_of_a += finite.map(|value| value * value).sum::<f64>();
        });
        let chunks_a = a.as_bytes().chunks(COMPARE_CHUNK * size_a);
        let chunks_b = b.as_bytes().chunks(COMPARE_CHUNK * size_b);
        for (number, (a, b)) in chunks_a.zip(chunks_b).enumerate() {
            if type_a == type_b && a == b {
                continue;
            }
            self.equal = false;
            let elements = a.chunks_exact(size_a).zip(b.chunks_exact(size_b));
            for (i, (a, b)) in elements.enumerate() {
                let (abs, size) = difference(a, b);
                if abs == 0.0 {
                    continue;
                }
                let at = start + number * COMPARE_CHUNK + i;
                self.num += 1;
                self.num_beyond += u64::from(!self.tolerance.accepts(abs, size));
                self.squares += abs * abs;
                self.first = self.first.or(Some(at));
                if abs > self.max_abs {
                    self.max_abs = abs;
                    self.at = Some(at);
                }
            }
        }
    }
}

/// The absolute difference of two elements, given as bytes, and the absolute value of the second.
type Difference = Box<dyn Fn(&[u8], &[u8]) -> (f64, f64)>;
/// The value of an element, given as bytes.
type Load = Box<dyn Fn(&[u8]) -> f64>;

fn difference(a: DType, b: DType) -> Difference {
    match (integer(a), integer(b)) {
        // f64 cannot represent large integers exactly.
        (Some(a), Some(b)) => Box::new(move |x, y| {
            let (x, y) = (a(x), b(y));
            (x.abs_diff(y) as f64, y.unsigned_abs() as f64)
        }),
        _ => {
            let a = float(a);
            let b = float(b);
            Box::new(move |x, y| {
                let (x, y) = (a(x), b(y));
                let abs = match (x, y) {
                    (x, y) if x == y || (x.is_nan() && y.is_nan()) => 0.0,
                    (x, y) if x.is_nan() || y.is_nan() => f64::INFINITY,
                    (x, y) => (x - y).abs(),
                };
                (abs, y.abs())
            })
        }
    }
}

/// The bytes of one element as an array.
fn own<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes
        .try_into()
        .expect("an element has the size of its type")
}

fn integer(dtype: DType) -> Option<fn(&[u8]) -> i128> {
    Some(match dtype {
        DType::I64 => |x| i64::from_le_bytes(own(x)).into(),
        DType::I32 => |x| i32::from_le_bytes(own(x)).into(),
        DType::I16 => |x| i16::from_le_bytes(own(x)).into(),
        DType::I8 => |x| i8::from_le_bytes(own(x)).into(),
        DType::U64 => |x| u64::from_le_bytes(own(x)).into(),
        DType::U32 => |x| u32::from_le_bytes(own(x)).into(),
        DType::U16 => |x| u16::from_le_bytes(own(x)).into(),
        DType::U8 | DType::Bool(_) => |x| x[0].into(),
        _ => return None,
    })
}

fn float(dtype: DType) -> Load {
    match dtype {
        DType::F64 => Box::new(|x| f64::from_le_bytes(own(x))),
        DType::F32 => Box::new(|x| f32::from_le_bytes(own(x)).into()),
        DType::F16 => Box::new(|x| f16::from_le_bytes(own(x)).to_f64()),
        DType::BF16 => Box::new(|x| bf16::from_le_bytes(own(x)).to_f64()),
        other => {
            let load = integer(other).expect("sources have no other types");
            Box::new(move |x| load(x) as f64)
        }
    }
}

/// The index of element number `at`.
fn index(mut at: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (i, &len) in index.iter_mut().zip(shape).rev() {
        *i = at % len;
        at /= len;
    }
    index
}
