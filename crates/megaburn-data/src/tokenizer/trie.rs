/// A set of byte strings with values, which finds all members that a text begins with.
#[derive(Clone, Debug, Default)]
pub(super) struct Trie {
    nodes: Vec<Node>,
    /// The bytes that lead to the children of each node, in ascending order.
    labels: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    value: Option<u32>,
    /// The first of its children, which follow each other in `nodes`.
    first: u32,
    num_children: u16,
}

impl Trie {
    /// The trie of `entries`. Of equal strings the first one counts.
    pub(super) fn new<'a>(entries: impl IntoIterator<Item = (&'a str, u32)>) -> Self {
        let mut sorted: Vec<(&[u8], u32)> = entries
            .into_iter()
            .map(|(text, value)| (text.as_bytes(), value))
            .collect();
        sorted.sort_by_key(|(text, _)| *text);
        sorted.dedup_by_key(|(text, _)| *text);
        let empty = Node {
            value: None,
            first: 0,
            num_children: 0,
        };
        let mut trie = Self {
            nodes: vec![empty],
            labels: vec![0],
        };
        // Each node with its depth and the sorted strings below it; children are appended in order.
        let mut open = vec![(0, 0..sorted.len())];
        let mut next = 0;
        while let Some((depth, range)) = open.get(next).cloned() {
            let mut rest = &sorted[range.clone()];
            let mut start = range.start;
            if let Some((text, value)) = rest.first()
                && text.len() == depth
            {
                trie.nodes[next].value = Some(*value);
                rest = &rest[1..];
                start += 1;
            }
            trie.nodes[next].first = trie.nodes.len() as u32;
            while let Some((text, _)) = rest.first() {
                let label = text[depth];
                let count = rest.partition_point(|(text, _)| text[depth] == label);
                open.push((depth + 1, start..start + count));
                trie.nodes.push(empty);
                trie.labels.push(label);
                trie.nodes[next].num_children += 1;
                rest = &rest[count..];
                start += count;
            }
            next += 1;
        }
        trie
    }

    /// The members that `text` begins with, as lengths and values, shortest first.
    pub(super) fn prefixes<'a>(
        &'a self,
        text: &'a [u8],
    ) -> impl Iterator<Item = (usize, u32)> + 'a {
        let mut node = self.nodes.first();
        let steps = (1..=text.len()).map_while(move |length| {
            let Node {
                first,
                num_children,
                ..
            } = *node?;
            let children = first as usize..first as usize + usize::from(num_children);
            let child = self.labels[children]
                .binary_search(&text[length - 1])
                .ok()?;
            node = self.nodes.get(first as usize + child);
            Some((length, node?.value))
        });
        steps.filter_map(|(length, value)| Some((length, value?)))
    }

    /// The longest member that `text` begins with, as length and value.
    pub(super) fn longest(&self, text: &[u8]) -> Option<(usize, u32)> {
        self.prefixes(text).last()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn all_members_that_begin_a_text_are_found(
            words in prop::collection::vec("[abé€]{1,4}", 0..40),
            text in "[abé€]{0,6}",
        ) {
            let entries = words.iter().enumerate().map(|(i, word)| (word.as_str(), i as u32));
            let trie = Trie::new(entries);
            let mut expected: Vec<(usize, u32)> = (0..words.len())
                .filter(|&i| text.starts_with(&words[i]) && !words[..i].contains(&words[i]))
                .map(|i| (words[i].len(), i as u32))
                .collect();
            expected.sort_unstable();
            let found: Vec<_> = trie.prefixes(text.as_bytes()).collect();
            prop_assert_eq!(trie.longest(text.as_bytes()), expected.last().copied());
            prop_assert_eq!(found, expected);
        }
    }
}
