use unicode_segmentation::UnicodeSegmentation;

/// The sentences of a text, without the whitespace around them and without empty ones.
///
/// A sentence ends after a full stop, question mark or exclamation mark of any script, with the
/// quotes and brackets that follow it, unless the text continues with a small letter; and at each
/// line break. An abbreviation before a capital letter, such as `Mr. Smith`, ends one too.
///
/// Source: Unicode Standard Annex 29, "Sentence Boundaries".
pub(super) fn sentences_of(text: &str) -> impl Iterator<Item = &str> {
    let sentences = text.split_sentence_bounds().map(str::trim);
    sentences.filter(|sentence| !sentence.is_empty())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("", "")]
    #[case(" \n\t ", "")]
    #[case("One. Two? Three!", "One.|Two?|Three!")]
    #[case(
        "He said \"No.\" Then (he left.) It was 3.14 p.m. and late.",
        "He said \"No.\"|Then (he left.)|It was 3.14 p.m. and late."
    )]
    #[case("A title\n\nIts text. \r\nMore", "A title|Its text.|More")]
    #[case("今日は。明日は？はい", "今日は。|明日は？|はい")]
    #[case("क्या है। हाँ।", "क्या है।|हाँ।")]
    #[case(
        "Mr. Smith met e.g. me... then left",
        "Mr.|Smith met e.g. me... then left"
    )]
    fn sentences_end_where_unicode_says(#[case] text: &str, #[case] expected: &str) {
        let found: Vec<&str> = sentences_of(text).collect();
        assert_eq!(found.join("|"), expected);
    }
}
