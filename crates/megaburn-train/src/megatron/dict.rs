//! Dicts of a `common.pt` that is written.

use megaburn_torch::pickle::Tree;

/// A dict with string keys, in which values are set.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Dict(Vec<(Tree, Tree)>);

impl Dict {
    /// The entries of a dict; none of another value.
    pub(super) fn of(tree: Tree) -> Self {
        match tree {
            Tree::Dict(entries) => Self(entries),
            _ => Self::default(),
        }
    }

    pub(super) fn get(&self, name: &str) -> Option<&Tree> {
        let mut entries = self.0.iter().rev();
        entries.find_map(|(key, value)| (*key == Tree::from(name)).then_some(value))
    }

    /// Sets a value. One that is the same up to the type of numbers and rounding stays as it is.
    pub(super) fn set(&mut self, name: &str, value: impl Into<Tree>) {
        let value = value.into();
        match self
            .0
            .iter_mut()
            .rev()
            .find(|(key, _)| *key == Tree::from(name))
        {
            Some((_, old)) if is_same(old, &value) => {}
            Some((_, old)) => *old = alike(old, value),
            None => self.0.push((name.into(), value)),
        }
    }

    /// Sets a value if there is none.
    pub(super) fn set_default(&mut self, name: &str, value: impl Into<Tree>) {
        if self.get(name).is_none() {
            self.set(name, value);
        }
    }

    pub(super) fn tree(self) -> Tree {
        Tree::Dict(self.0)
    }
}

/// A new value in the type of the old one, where numbers have two.
fn alike(old: &Tree, new: Tree) -> Tree {
    match (old, new) {
        (Tree::Float(_), Tree::Int(number)) => Tree::Float(number as f64),
        (_, new) => new,
    }
}

fn is_same(old: &Tree, new: &Tree) -> bool {
    if let (Some(old), Some(new)) = (number(old), number(new)) {
        return (old - new).abs() <= 1e-12 * old.abs().max(new.abs());
    }
    match (old, new) {
        (Tree::List(old), Tree::List(new)) | (Tree::Tuple(old), Tree::Tuple(new)) => {
            let pairs = old.iter().zip(new);
            old.len() == new.len() && pairs.into_iter().all(|(old, new)| is_same(old, new))
        }
        (old, new) => old == new,
    }
}

/// The number of either kind.
pub(super) fn number(tree: &Tree) -> Option<f64> {
    match tree {
        Tree::Int(number) => Some(*number as f64),
        Tree::Float(number) => Some(*number),
        _ => None,
    }
}

/// An integer of a count.
pub(super) fn int(count: impl TryInto<i64>) -> Tree {
    Tree::Int(count.try_into().unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_keeps_its_place_and_its_type() {
        let entries = [
            ("a", Tree::Float(2.0)),
            ("b", Tree::Int(3)),
            ("c", Tree::None),
        ];
        let entries = entries.map(|(name, value)| (name.into(), value));
        let mut dict = Dict::of(Tree::Dict(entries.to_vec()));
        let before = dict.clone();
        dict.set("a", 2);
        dict.set("b", 3.0 + 1e-15);
        dict.set_default("c", 1);
        assert_eq!(dict, before);
        dict.set("a", 4);
        dict.set("d", "new");
        assert_eq!(dict.get("a"), Some(&Tree::Float(4.0)));
        assert_eq!(dict.get("d"), Some(&Tree::from("new")));
        assert_eq!(Dict::of(Tree::None), Dict::default());
    }
}
