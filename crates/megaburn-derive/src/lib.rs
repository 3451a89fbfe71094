//! The derive macro of the trait `Sharded` in `megaburn-parallel`. Use it from there, or from
//! `megaburn::prelude`.

mod fields;
mod sharded;

use proc_macro::TokenStream;
use syn::{DeriveInput, Error, parse_macro_input};

/// Derives `Sharded`: every field that Burn's `Module` has is added to the shard plan, under its
/// name, and reached by `parallelize`. A field that Burn skips, by `#[module(skip)]`, is skipped.
///
/// # Attributes
/// | attribute of a field | meaning |
/// |---|---|
/// | `#[sharded(replicated = group)]` | A plain Burn module, such as `LayerNorm`, of which every member of a group has the same copy. `group` is the field of the module that holds the group. |
/// | `#[sharded(replicated)]` | The same, of the group that splits the module's other layers. |
/// | `#[sharded(skip)]` | The field has no parameters, and its type does not implement `Sharded`. A skipped field that does have parameters is refused when the plan is made. |
///
/// # Errors
/// A tuple struct, a union, a variant that does not hold one module, or an unknown attribute does not
/// compile, nor does a field whose type does not implement `Sharded`.
#[proc_macro_derive(Sharded, attributes(sharded, module))]
pub fn derive_sharded(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    sharded::implementation(&input)
        .unwrap_or_else(Error::into_compile_error)
        .into()
}
