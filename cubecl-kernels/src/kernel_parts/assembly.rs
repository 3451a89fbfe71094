//! Inline assembly of several instructions or results. Operands are addressed by register number:
//! the registers of the result from 0 on, followed by the inputs.

use std::ops::Range;

use cubecl::prelude::*;

/// Starts the comment that names the operands of an assembly, which the macro requires.
pub(crate) const OPERANDS: &str = "// operands: ";

/// `{%first, ...}`.
pub(crate) fn registers(numbers: Range<usize>) -> String {
    let numbers: Vec<String> = numbers.map(|number| format!("%{number}")).collect();
    format!("{{{}}}", numbers.join(", "))
}

/// The value of a variable; passed to assembly directly, a variable would be its address.
#[cube]
pub(crate) fn value<P: Scalar>(variable: P) -> P {
    intrinsic!(|scope| variable.read_value(scope).into())
}
