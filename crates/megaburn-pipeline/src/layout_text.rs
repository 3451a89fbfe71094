//! Parses Megatron-LM's notation for the contents of each pipeline stage.
//!
//! Source: Megatron-LM `megatron/core/transformer/pipeline_parallel_layer_layout.py`.

use std::{iter::Peekable, str::CharIndices};

use crate::error::PipelineError;

/// The most letters that a text may expand to: ten thousand layers, and the bars between them.
const MOST: usize = 1 << 15;

/// The number of layers of each stage. `num_stages` checks the number of stages; `None` accepts
/// any.
///
/// # Errors
/// The text is invalid, or belongs to another model or pipeline.
pub(crate) fn layers(
    text: &str,
    num_layers: usize,
    num_stages: Option<usize>,
) -> Result<Vec<usize>, PipelineError> {
    let refuse = |why: String| PipelineError::LayoutText {
        text: text.into(),
        why,
    };
    let letters = letters(text)?;
    let stages: Vec<&[char]> = letters.split(|letter| *letter == '|').collect();
    if let Some(num_stages) = num_stages.filter(|num| *num != stages.len()) {
        let found = stages.len();
        return Err(refuse(format!(
            "it has {found} stages, but pp times chunks is {num_stages}"
        )));
    }
    let layers = letters.iter().filter(|letter| **letter == 't').count();
    if layers != num_layers {
        return Err(refuse(format!(
            "it has {layers} layers (t), but the model has {num_layers}"
        )));
    }
    if let Some(empty) = stages.iter().position(|stage| stage.is_empty()) {
        return Err(refuse(format!("stage {empty} is empty")));
    }
    let inner = letters.get(1..letters.len() - 1).unwrap_or_default();
    let ends = [letters.first(), letters.last()] == [Some(&'E'), Some(&'L')];
    if !ends || inner.iter().any(|letter| matches!(letter, 'E' | 'L')) {
        return Err(refuse(
            "it must begin with its only E and end with its only L".into(),
        ));
    }
    let last = stages.len() - 1;
    if let Some(early) = stages[..last].iter().position(|stage| stage.contains(&'m')) {
        let why = format!(
            "stage {early} has an MTP depth (m), which only the last stage can have, \
                    before L"
        );
        return Err(refuse(why));
    }
    if stages[last].windows(2).any(|two| two == ['m', 't']) {
        return Err(refuse(
            "MTP depths (m) must come after all layers (t)".into(),
        ));
    }
    let of = |stage: &[char]| stage.iter().filter(|letter| **letter == 't').count();
    Ok(stages.into_iter().map(of).collect())
}

/// The number of multi-token prediction blocks in the text.
///
/// # Errors
/// The text is invalid.
pub(crate) fn mtp_layers(text: &str) -> Result<usize, PipelineError> {
    Ok(letters(text)?
        .into_iter()
        .filter(|letter| *letter == 'm')
        .count())
}

fn letters(text: &str) -> Result<Vec<char>, PipelineError> {
    let mut parser = Parser {
        chars: text.char_indices().peekable(),
        end: text.len(),
    };
    let refuse = |why: String| PipelineError::LayoutText {
        text: text.into(),
        why,
    };
    parser.sequence(0).map_err(refuse)
}

struct Parser<'a> {
    chars: Peekable<CharIndices<'a>>,
    end: usize,
}

impl Parser<'_> {
    /// Parses up to the end, or to the closing bracket.
    fn sequence(&mut self, depth: usize) -> Result<Vec<char>, String> {
        let mut all = Vec::new();
        while let Some(&(at, letter)) = self.chars.peek() {
            if letter == ')' && depth > 0 {
                break;
            }
            self.chars.next();
            let item = match letter {
                ',' => continue,
                'E' | 't' | 'm' | 'L' | '|' => vec![letter],
                '(' if depth < 8 => {
                    let inner = self.sequence(depth + 1)?;
                    if self.chars.next().is_none() {
                        return Err(format!("the bracket at {at} is not closed"));
                    }
                    inner
                }
                _ => {
                    return Err(format!(
                        "`{letter}` at {at} is not one of E t m L | ( ) * ,"
                    ));
                }
            };
            let times = self.times()?;
            if times.saturating_mul(item.len()).saturating_add(all.len()) > MOST {
                return Err(format!("it expands to more than {MOST} letters"));
            }
            (0..times).for_each(|_| all.extend(&item));
        }
        Ok(all)
    }

    /// Parses the optional `*n` after an item; 1 if there is none.
    fn times(&mut self) -> Result<usize, String> {
        if self.chars.next_if(|(_, letter)| *letter == '*').is_none() {
            return Ok(1);
        }
        let at = self.chars.peek().map_or(self.end, |(at, _)| *at);
        let mut digits = String::new();
        while let Some((_, digit)) = self.chars.next_if(|(_, letter)| letter.is_ascii_digit()) {
            digits.push(digit);
        }
        digits
            .parse()
            .map_err(|_| format!("expected a number at {at}, after `*`"))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("Ett|ttL", 4, &[2, 2])]
    #[case("E|t*3|tt,|L", 5, &[0, 3, 2, 0])]
    #[case("Et*3|(tt|)*3L", 9, &[3, 2, 2, 2, 0])]
    #[case("Et*3|(tt|)*29,L", 61, &[&[3][..], &[2; 29], &[0]].concat())]
    #[case("E(t|)*2(t*2|)*2tL", 7, &[1, 1, 2, 2, 1])]
    #[case("E((tt|)*2t|)*2L", 10, &[2, 2, 1, 2, 2, 1, 0])]
    #[case("EtL", 1, &[1])]
    #[case("EtmL", 1, &[1])]
    #[case("Ett|(tt|)*2,m*2L", 6, &[2, 2, 2, 0])]
    fn a_text_is_read(#[case] text: &str, #[case] num_layers: usize, #[case] expected: &[usize]) {
        assert_eq!(
            layers(text, num_layers, Some(expected.len())).unwrap(),
            expected
        );
    }

    #[rstest]
    #[case("", 4, 2, "it has 1 stages, but pp times chunks is 2")]
    #[case("Ett|ttL", 4, 4, "it has 2 stages, but pp times chunks is 4")]
    #[case("Ett|tL", 4, 2, "it has 3 layers (t), but the model has 4")]
    #[case("Ett||ttL", 4, 3, "stage 1 is empty")]
    #[case(
        "tt|ttL",
        4,
        2,
        "it must begin with its only E and end with its only L"
    )]
    #[case("Ett|tLt", 4, 2, "it must begin with its only E")]
    #[case("EEtt|ttL", 4, 2, "it must begin with its only E")]
    #[case("|", 0, 2, "stage 0 is empty")]
    #[case("E", 0, 1, "it must begin with its only E")]
    #[case(
        "Et*3|(tt|)*29,m|L",
        61,
        32,
        "stage 30 has an MTP depth (m), which only the last stage"
    )]
    #[case("Ett|tmtL", 4, 2, "(m) must come after all layers (t)")]
    #[case("Ett|xtL", 4, 2, "`x` at 4 is not one of E t m L")]
    #[case("Ett)|ttL", 4, 2, "`)` at 3 is not one of")]
    #[case("E(tt|ttL", 4, 2, "the bracket at 1 is not closed")]
    #[case("Et*|ttL", 4, 2, "expected a number at 3, after `*`")]
    #[case("Et*", 4, 2, "expected a number at 3")]
    #[case("Et*99999999999999999999|L", 4, 2, "expected a number")]
    #[case("E(t*30000)*30000|L", 4, 2, "more than 32768 letters")]
    #[case("((((((((((t))))))))))", 4, 2, "`(` at 8 is not one of")]
    fn a_text_that_does_not_add_up_is_refused(
        #[case] text: &str,
        #[case] num_layers: usize,
        #[case] num_stages: usize,
        #[case] message: &str,
    ) {
        let error = layers(text, num_layers, Some(num_stages))
            .unwrap_err()
            .to_string();
        assert!(error.contains(message), "{error}");
        assert!(error.contains(text), "{error}");
    }
}
