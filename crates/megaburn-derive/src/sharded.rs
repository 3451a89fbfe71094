//! The implementation of `Sharded` that the macro writes.

use proc_macro_crate::{FoundCrate, crate_name};
use proc_macro2::{Span, TokenStream};
use quote::quote;
use syn::{Data, DeriveInput, Error, Field, Fields, Ident, Path, Result, parse_quote, parse_str};

use crate::fields::{Entry, name};

pub(crate) fn implementation(input: &DeriveInput) -> Result<TokenStream> {
    implementation_with(input, &trait_crate()?)
}

/// The implementation, with the path of the crate that has the trait.
fn implementation_with(input: &DeriveInput, traits: &Path) -> Result<TokenStream> {
    let (shards, layers) = match &input.data {
        Data::Struct(data) => {
            let calls = data.fields.iter().map(calls).collect::<Result<Vec<_>>>()?;
            let (shards, layers): (Vec<_>, Vec<_>) = calls.into_iter().unzip();
            (quote!(#(#shards)*), quote!(#(#layers)*))
        }
        Data::Enum(data) => {
            let arms = |walk: &str| {
                let walk = Ident::new(walk, Span::call_site());
                let arms = data.variants.iter().map(|variant| match &variant.fields {
                    Fields::Unnamed(fields) if fields.unnamed.len() == 1 => {
                        let (ident, name) = (&variant.ident, variant.ident.to_string());
                        Ok(quote!(Self::#ident(module) => #walk.child(#name, module),))
                    }
                    _ => {
                        let why = "a variant holds one module, as Burn's `Module` needs it";
                        Err(Error::new_spanned(variant, why))
                    }
                });
                let arms = arms.collect::<Result<Vec<_>>>()?;
                Ok::<_, Error>(quote!(match self { #(#arms)* }))
            };
            (arms("plan")?, arms("layers")?)
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
                #shards
            }

            fn parallelize(&mut self, layers: &mut #traits::Layers<'_>) {
                #layers
            }
        }
    })
}

/// The call that adds a field to the plan, and the call that walks down it.
fn calls(field: &Field) -> Result<(TokenStream, TokenStream)> {
    let ident = name(field)?;
    let name = ident.to_string();
    Ok(match Entry::of(field)? {
        Entry::Child => (
            quote!(plan.child(#name, &self.#ident);),
            quote!(layers.child(#name, &mut self.#ident);),
        ),
        Entry::Replicated(group) => (
            quote!(plan.replicated(#name, &self.#ident, &self.#group);),
            quote!(layers.replicated(#name, &self.#ident, &mut self.#group);),
        ),
        Entry::ReplicatedInModule => (
            quote!(plan.replicated_in_module(#name, &self.#ident);),
            quote!(layers.replicated_in_module(#name, &self.#ident);),
        ),
        Entry::Skipped => (TokenStream::new(), TokenStream::new()),
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
                #[sharded(replicated)] head: Linear,
                #[module(skip)] of: Group,
                #[sharded(skip)] dropout: Odd,
                inner: T,
            }",
        )
        .unwrap();
        let body = "plan.child(\"up\",&self.up);plan.replicated(\"norm\",&self.norm,&self.of);\
            plan.replicated_in_module(\"head\",&self.head);plan.child(\"inner\",&self.inner);";
        let head = "impl<T:Module+::here::Sharded>::here::ShardedforNet<T>";
        let shards = format!("{head}{{fnshards(&self,plan:&mut::here::PlanBuilder){{{body}}}");
        assert!(found.starts_with(&shards), "{found}");
        let body = "layers.child(\"up\",&mutself.up);\
            layers.replicated(\"norm\",&self.norm,&mutself.of);\
            layers.replicated_in_module(\"head\",&self.head);\
            layers.child(\"inner\",&mutself.inner);";
        let layers = format!("fnparallelize(&mutself,layers:&mut::here::Layers<'_>){{{body}}}}}");
        assert!(found.ends_with(&layers), "{found}");
    }

    #[test]
    fn a_variant_is_added_under_its_name() {
        let found = written("enum Either { Dense(Mlp), Sparse(Moe) }").unwrap();
        assert!(found.contains("Self::Dense(module)=>plan.child(\"Dense\",module),"));
        assert!(found.contains("Self::Sparse(module)=>plan.child(\"Sparse\",module),"));
        assert!(found.contains("Self::Dense(module)=>layers.child(\"Dense\",module),"));
    }

    #[rstest]
    #[case("struct Pair(Mlp, Mlp);", "fields with names")]
    #[case("enum Two { Both(Mlp, Mlp) }", "a variant holds one module")]
    #[case("union Any { a: u8 }", "structs and enums")]
    #[case(
        "struct Net { #[sharded(replicate)] a: Mlp }",
        "write `skip`, `replicated`, or `replicated = FIELD`"
    )]
    fn bad_input_is_refused(#[case] code: &str, #[case] why: &str) {
        let error = written(code).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}
