//! How the fields of a module get into its shard plan.

use syn::{Error, Field, Ident, Result};

/// How one field gets into the plan.
#[derive(Debug)]
pub(crate) enum Entry {
    /// By its own `Sharded`.
    Child,
    /// As a plain Burn module that every member of the group in another field has whole.
    Replicated(Ident),
    /// As a plain Burn module that every member of the other layers' group has whole.
    ReplicatedInModule,
    /// Not at all.
    Skipped,
}

impl Entry {
    pub(crate) fn of(field: &Field) -> Result<Self> {
        let mut entry = Self::Child;
        for attribute in &field.attrs {
            if attribute.path().is_ident("module") {
                attribute.parse_nested_meta(|meta| {
                    if meta.path.is_ident("skip") {
                        entry = Self::Skipped;
                    }
                    // The rest is Burn's.
                    if meta.input.peek(syn::Token![=]) {
                        meta.value()?.parse::<syn::Expr>()?;
                    }
                    Ok(())
                })?;
            } else if attribute.path().is_ident("sharded") {
                attribute.parse_nested_meta(|meta| {
                    entry = if meta.path.is_ident("skip") {
                        Self::Skipped
                    } else if !meta.path.is_ident("replicated") {
                        let why = "write `skip`, `replicated`, or `replicated = FIELD` with the field of \
                            the group";
                        return Err(meta.error(why));
                    } else if meta.input.peek(syn::Token![=]) {
                        Self::Replicated(meta.value()?.parse()?)
                    } else {
                        Self::ReplicatedInModule
                    };
                    Ok(())
                })?;
            }
        }
        Ok(entry)
    }
}

/// The name of a field, as Burn's `Module` has it.
pub(crate) fn name(field: &Field) -> Result<&Ident> {
    let why = "`Sharded` needs fields with names, as Burn's `Module` does";
    field
        .ident
        .as_ref()
        .ok_or_else(|| Error::new_spanned(field, why))
}
