//! Elementwise reductions over the members' contributions, always in rank order. This is the only
//! place that decides the order of a floating-point sum.

use std::borrow::Cow;

use burn::tensor::{Bytes, DType};
use bytemuck::Pod;
use half::{bf16, f16};

use crate::{call::ReduceOp, message::Payload};

/// Reduces contributions of equal length; `None` where `dtype` does not support `op`.
pub(crate) fn reduce(parts: &[Payload], dtype: DType, op: ReduceOp) -> Option<Bytes> {
    Some(match dtype {
        DType::F32 => float::<f32, f32>(parts, op, |x| x, |x| x),
        DType::F64 => float::<f64, f64>(parts, op, |x| x, |x| x),
        DType::BF16 => float::<bf16, f32>(parts, op, bf16::to_f32, bf16::from_f32),
        DType::F16 => float::<f16, f32>(parts, op, f16::to_f32, f16::from_f32),
        _ if op == ReduceOp::Mean => return None,
        DType::I32 => int::<i32>(parts, op, i32::wrapping_add),
        DType::I64 => int::<i64>(parts, op, i64::wrapping_add),
        DType::U8 => int::<u8>(parts, op, u8::wrapping_add),
        _ => return None,
    })
}

trait Real: Copy + PartialOrd + std::ops::Add<Output = Self> + std::ops::Div<Output = Self> {
    fn from_count(count: usize) -> Self;
    fn is_nan(self) -> bool;
}

impl Real for f32 {
    fn from_count(count: usize) -> Self {
        count as f32
    }
    fn is_nan(self) -> bool {
        self.is_nan()
    }
}

impl Real for f64 {
    fn from_count(count: usize) -> Self {
        count as f64
    }
    fn is_nan(self) -> bool {
        self.is_nan()
    }
}

/// Sums half types in `A = f32` and rounds once.
fn float<T: Pod + Send + Sync, A: Real>(
    parts: &[Payload],
    op: ReduceOp,
    widen: impl Fn(T) -> A,
    narrow: impl Fn(A) -> T,
) -> Bytes {
    let mut acc: Vec<A> = view::<T>(&parts[0]).iter().map(|&x| widen(x)).collect();
    for part in &parts[1..] {
        let part = view::<T>(part);
        let pairs = acc.iter_mut().zip(part.iter());
        match op {
            ReduceOp::Sum | ReduceOp::Mean => pairs.for_each(|(a, &x)| *a = *a + widen(x)),
            // A NaN on any rank must be seen on all.
            ReduceOp::Max => pairs.for_each(|(a, &x)| {
                let x = widen(x);
                if x > *a || x.is_nan() {
                    *a = x;
                }
            }),
        }
    }
    if op == ReduceOp::Mean {
        let count = A::from_count(parts.len());
        acc.iter_mut().for_each(|a| *a = *a / count);
    }
    Bytes::from_elems(acc.into_iter().map(narrow).collect::<Vec<T>>())
}

fn int<T: Pod + Send + Sync + Ord>(
    parts: &[Payload],
    op: ReduceOp,
    add: impl Fn(T, T) -> T,
) -> Bytes {
    let mut acc = view::<T>(&parts[0]).into_owned();
    for part in &parts[1..] {
        let part = view::<T>(part);
        let pairs = acc.iter_mut().zip(part.iter());
        match op {
            ReduceOp::Max => pairs.for_each(|(a, &x)| *a = (*a).max(x)),
            ReduceOp::Sum | ReduceOp::Mean => pairs.for_each(|(a, &x)| *a = add(*a, x)),
        }
    }
    Bytes::from_elems(acc)
}

/// Views the bytes as elements, or copies them where bytes from a socket are not aligned.
fn view<T: Pod>(payload: &Payload) -> Cow<'_, [T]> {
    let bytes = payload.as_slice();
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => Cow::Owned(bytemuck::allocation::pod_collect_to_vec(bytes)),
    }
}
