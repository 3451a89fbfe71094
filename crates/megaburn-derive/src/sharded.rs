//! The implementation of `Sharded` that the macro writes.

use proc_macro_crate::{FoundCrate, crate_name};
use proc_macro2::{Span, TokenStream};
use quote::quote;
use syn::{Data, DeriveInput, Error, Field, Fields, Path, Result, parse_quote, parse_str};

use crate::fields::{Entry, name};

pub(crate) fn implementation(input: &DeriveInput) -> Result<TokenStream> {
    implementation_with(input, &trait_crate()?)
}

/// The implementation, with the path of the crate that has the trait.
fn implementation_with(input: &DeriveInput, traits: &Path) -> Result<TokenStream> {
    let body = match &input.data {
        Data::Struct(data) => {
            let calls = data.fields.iter().map(call).collect::<Result<Vec<_>>>()?;
            quote!(#(#calls)*)
        }
        Data::Enum(data) => {
            let arms = data.variants.iter().map(|variant| match &variant.fields {
                Fields::Unnamed(fields) if fields.unnamed.len() == 1 => {
                    let (ident, name) = (&variant.ident, variant.ident.to_string());
                    Ok(quote!(Self::#ident(module) => plan.child(#name, module),))
                }
                _ => {
                    let why = "a variant holds one module, as Burn's `Module` needs it";
                    Err(Error::new_spanned(variant, why))
                }
            });
            let arms = arms.collect::<Result<Vec<_>>>()?;
            quote!(match self { #(#arms)* })
        }
        Data::Union(_) => {
            let why = "`Sharded` is derived for structs and enums";
            return Err(Error::new_spanned(&input.ident, why));
        }
    };
    let ident = &input.ident;
    let mut generics = input.generics.clone();
    for parameter in generics.type_params_mut() {
        parameter.bounds.push(parse_quote!(#traits::Sharded));
    }
    let (of_impl, of_type, bounds) = generics.split_for_impl();
    Ok(quote! {
        impl #of_impl #traits::Sharded for #ident #of_type #bounds {
            fn shards(&self, plan: &mut #traits::PlanBuilder) {
                #body
            }
        }
    })
}

/// The call that adds a field to the plan.
fn call(field: &Field) -> Result<TokenStream> {
    let ident = name(field)?;
    let name = ident.to_string();
    Ok(match Entry::of(field)? {
        Entry::Child => quote!(plan.child(#name, &self.#ident);),
        Entry::Replicated(group) => quote!(plan.replicated(#name, &self.#ident, &self.#group);),
        Entry::Skipped => TokenStream::new(),
    })
}

/// The path of the crate that has the trait, under the name that it has where the macro is used.
fn trait_crate() -> Result<Path> {
    let found = [("megaburn-parallel", ""), ("megaburn", "::parallel")]
        .into_iter()
        .find_map(|(package, module)| {
            let name = match crate_name(package).ok()? {
                FoundCrate::Itself => package.replace('-', "_"),
                FoundCrate::Name(name) => name,
            };
            Some(format!("::{name}{module}"))
        });
    let why = "`derive(Sharded)` needs `megaburn` or `megaburn-parallel` in Cargo.toml";
    let path = found.ok_or_else(|| Error::new(Span::call_site(), why))?;
    parse_str(&path)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn written(code: &str) -> Result<String> {
        let input = parse_str(code).unwrap();
        let found = implementation_with(&input, &parse_quote!(::here))?;
        Ok(found.to_string().replace(' ', ""))
    }

    #[test]
    fn fields_are_added_under_their_names() {
        let found = written(
            "struct Net<T: Module> {
                up: ParallelLinear,
                #[sharded(replicated = of)] norm: LayerNorm,
                #[module(skip)] of: Group,
                #[sharded(skip)] dropout: Odd,
                inner: T,
            }",
        )
        .unwrap();
        let body = "plan.child(\"up\",&self.up);plan.replicated(\"norm\",&self.norm,&self.of);\
            plan.child(\"inner\",&self.inner);";
        let head = "impl<T:Module+::here::Sharded>::here::ShardedforNet<T>";
        assert_eq!(
            found,
            format!("{head}{{fnshards(&self,plan:&mut::here::PlanBuilder){{{body}}}}}")
        );
    }

    #[test]
    fn a_variant_is_added_under_its_name() {
        let found = written("enum Either { Dense(Mlp), Sparse(Moe) }").unwrap();
        assert!(found.contains("Self::Dense(module)=>plan.child(\"Dense\",module),"));
        assert!(found.contains("Self::Sparse(module)=>plan.child(\"Sparse\",module),"));
    }

    #[rstest]
    #[case("struct Pair(Mlp, Mlp);", "fields with names")]
    #[case("enum Two { Both(Mlp, Mlp) }", "a variant holds one module")]
    #[case("union Any { a: u8 }", "structs and enums")]
    #[case(
        "struct Net { #[sharded(replicate)] a: Mlp }",
        "write `skip`, or `replicated = FIELD`"
    )]
    #[case("struct Net { #[sharded(replicated)] a: Mlp }", "expected `=`")]
    fn bad_input_is_refused(#[case] code: &str, #[case] why: &str) {
        let error = written(code).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}
