//! Rules of layers that stand in one module.

use std::collections::BTreeMap;

use super::{
    layers::{Kind, Layer},
    plan::{Rule, Style},
    refusal::refuse,
};
use crate::error::ParallelError;

/// Refuses a column split whose output nothing sums, and a row split whose input nothing splits.
/// The two stand in one module, such as an MLP or an attention, or one of them in a module of that
/// module, such as the gated unit of an MLP.
pub(super) fn check_pairs(rules: &BTreeMap<String, Rule>) -> Result<(), ParallelError> {
    for (path, rule) in rules {
        if !PAIR.contains(&rule.style) {
            continue;
        }
        let module = of_module(path);
        if has_pair(rules, pair_module(rules, module)) {
            continue;
        }
        let place = shown(module);
        return refuse(
            path,
            match rule.style {
                Style::Column => format!(
                    "a column split leaves its output split, and {place} has no row split that sums it: \
                    add one, or use `column_gathered`"
                ),
                _ => format!(
                    "a row split takes a split input, and {place} has no column split that makes one: add \
                    one, or use `column_gathered` here"
                ),
            },
        );
    }
    Ok(())
}

/// Refuses a linear layer without a rule next to a column split and a row split, because it may
/// stand between them. Each rank would then compute the gradients of its own features only, e.g.
/// those of its own query heads in the keys and values of a multi-query attention.
pub(super) fn check_siblings(
    rules: &BTreeMap<String, Rule>,
    layers: &[Layer],
) -> Result<(), ParallelError> {
    for Layer { path, kind } in layers {
        let is_free = matches!(kind, Kind::Linear) && !rules.contains_key(path);
        let module = pair_module(rules, of_module(path));
        if is_free && has_pair(rules, module) {
            let place = shown(module);
            return refuse(
                path,
                format!(
                    "no pattern matches it, and {place} has a column split and a row split, between which \
                    each rank would get a part of its gradient: split it too (keys and values of one \
                    head by `column` and `shared_heads(1)`) or, if it stands before or after them, name \
                    it in `whole`"
                ),
            );
        }
    }
    Ok(())
}

/// The path of the module that has a layer.
fn of_module(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(module, _)| module)
}

/// The styles that pair.
const PAIR: [Style; 2] = [Style::Column, Style::Row];

/// Returns the module in which the layers of `module` form a pair of column and row: its parent if it
/// has only one half of the pair.
fn pair_module<'a>(rules: &BTreeMap<String, Rule>, module: &'a str) -> &'a str {
    let is_half =
        PAIR.iter().any(|style| has_style(rules, module, *style)) && !has_pair(rules, module);
    if is_half { of_module(module) } else { module }
}

/// Whether a module has both styles. A module of it that has half of a pair counts for one of them.
fn has_pair(rules: &BTreeMap<String, Rule>, module: &str) -> bool {
    let has_half = |inner: &str, style| {
        let is_inner = !inner.is_empty() && of_module(inner) == module;
        is_inner && has_style(rules, inner, style) && !has_pair(rules, inner)
    };
    let [column, row] = PAIR.map(|style| has_style(rules, module, style));
    let mut inner = rules.keys().map(|path| of_module(path));
    match (column, row) {
        (true, true) => true,
        (true, false) => inner.any(|inner| has_half(inner, Style::Row)),
        (false, true) => inner.any(|inner| has_half(inner, Style::Column)),
        (false, false) => false,
    }
}

/// Whether a layer of a module has a style.
fn has_style(rules: &BTreeMap<String, Rule>, module: &str, style: Style) -> bool {
    let mut rules = rules.iter();
    rules.any(|(path, rule)| rule.style == style && of_module(path) == module)
}

/// A module in a message.
fn shown(module: &str) -> String {
    if module.is_empty() {
        "the module".into()
    } else {
        format!("`{module}`")
    }
}
