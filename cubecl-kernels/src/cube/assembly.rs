//! Assemblies of several instructions or results: their operands go by their registers' numbers, those of the result
//! from 0 on, then the inputs'.

use std::ops::Range;

use cubecl::prelude::*;

/// Begins a comment that names the operands of an assembly, as the macro wants.
pub(crate) const OPERANDS: &str = "// operands: ";

/// `{%first, ...}`.
pub(crate) fn registers(numbers: Range<usize>) -> String {
    let numbers: Vec<String> = numbers.map(|number| format!("%{number}")).collect();
    format!("{{{}}}", numbers.join(", "))
}

/// What a variable holds: an assembly takes a variable itself for its address.
#[cube]
pub(crate) fn value<P: Scalar>(variable: P) -> P {
    intrinsic!(|scope| variable.read_value(scope).into())
}
