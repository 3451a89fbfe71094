use crate::error::ParallelError;

/// A pattern of paths. `*` matches any part of a name, never a dot; `{a,b}` matches `a` or `b`.
pub(super) struct Pattern {
    /// The patterns without braces.
    plain: Vec<String>,
}

impl Pattern {
    pub(super) fn new(text: &str) -> Result<Self, ParallelError> {
        let mut plain = vec![String::new()];
        let mut rest = text;
        while let Some(start) = rest.find(['{', '}']) {
            let alternatives = rest[start..]
                .strip_prefix('{')
                .and_then(|inner| inner.split_once('}'))
                .filter(|(inner, _)| !inner.contains('{'));
            let Some((alternatives, after)) = alternatives else {
                return Err(ParallelError::Config {
                    layer: "parallelize",
                    name: text.into(),
                    why: "the braces of the pattern do not pair; write `{a,b}`".into(),
                });
            };
            let before = &rest[..start];
            let mut longer = Vec::new();
            for begun in &plain {
                for alternative in alternatives.split(',') {
                    longer.push(format!("{begun}{before}{}", alternative.trim()));
                }
            }
            plain = longer;
            rest = after;
        }
        plain.iter_mut().for_each(|pattern| pattern.push_str(rest));
        Ok(Self { plain })
    }

    pub(super) fn matches(&self, path: &str) -> bool {
        self.plain.iter().any(|pattern| {
            let names: Vec<_> = path.split('.').collect();
            let patterns: Vec<_> = pattern.split('.').collect();
            let mut pairs = patterns.iter().zip(&names);
            patterns.len() == names.len() && pairs.all(|(pattern, name)| is_match(pattern, name))
        })
    }
}

/// Whether a name has the texts between the stars of a pattern, in their order.
fn is_match(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(first) else {
        return false;
    };
    let texts: Vec<_> = rest.split('*').collect();
    let Some((last, between)) = texts.split_last() else {
        return true;
    };
    for text in between {
        match name.find(text) {
            Some(at) => name = &name[at + text.len()..],
            None => return false,
        }
    }
    name.ends_with(last)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("head", "head", true)]
    #[case("head", "heads", false)]
    #[case("blocks.*.mlp.up", "blocks.11.mlp.up", true)]
    #[case("blocks.*.mlp.up", "blocks.mlp.up", false)]
    #[case("*", "a.b", false)]
    #[case("blocks.*.attn.{q,k, v}", "blocks.0.attn.v", true)]
    #[case("blocks.*.attn.{q,k,v}", "blocks.0.attn.o", false)]
    #[case("{enc,dec}oder.w{1,2}", "decoder.w2", true)]
    #[case("{enc,dec}oder.w{1,2}", "decoder.w3", false)]
    #[case("l*_*j", "l1_proj", true)]
    #[case("l*_*j", "l1proj", false)]
    #[case("a*a", "a", false)]
    fn patterns_match_paths(#[case] pattern: &str, #[case] path: &str, #[case] expected: bool) {
        assert_eq!(Pattern::new(pattern).unwrap().matches(path), expected);
    }

    #[rstest]
    #[case("a.{b")]
    #[case("a.b}")]
    #[case("{a,{b}}")]
    fn braces_pair(#[case] pattern: &str) {
        let error = Pattern::new(pattern).err().unwrap().to_string();
        assert!(error.contains("do not pair"), "{error}");
    }
}
