use std::path::Path;

use crate::error::DataError;

/// Whether a path is a URL, such as `s3://bucket/web`: a scheme, and `://`.
pub fn is_url(path: impl AsRef<Path>) -> bool {
    let Some((scheme, _)) = path
        .as_ref()
        .to_str()
        .and_then(|path| path.split_once("://"))
    else {
        return false;
    };
    let is_part = |c: char| c.is_ascii_alphanumeric() || ['+', '-', '.'].contains(&c);
    scheme.starts_with(|c: char| c.is_ascii_alphabetic()) && scheme.chars().all(is_part)
}

/// The error of a text that is no file.
pub(crate) fn missing(text: &Path) -> DataError {
    match is_url(text) {
        true => DataError::UrlOfText {
            url: text.display().to_string(),
        },
        false => DataError::Missing { path: text.into() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        corpus::Corpus, indexed::IndexedDataset, preprocess::PreprocessConfig,
        text_cache::TextCache, tokenizer::ByteTokenizer,
    };

    #[test]
    fn a_url_begins_with_a_scheme() {
        for url in [
            "s3://b/web",
            "gs://b/web",
            "https://h:1/web.bin",
            "file:///tmp/web",
        ] {
            assert!(is_url(url), "{url}");
        }
        for path in [
            "web",
            "/tmp/web",
            "s3:/b/web",
            "://web",
            "a/b://web",
            "1s://web",
            "",
        ] {
            assert!(!is_url(path), "{path}");
        }
    }

    #[test]
    fn texts_are_not_read_from_urls() {
        let cache = TextCache::new("nowhere");
        for url in [
            "s3://bucket/a.jsonl",
            "https://host/a.txt",
            "gs://bucket/a.txt.gz",
        ] {
            let expected = format!("`{url}` is the URL of a text; download it");
            let config = PreprocessConfig::new(vec![url.into()], "nowhere/web".into());
            for error in [
                Corpus::from_file(url).unwrap_err(),
                cache
                    .open(url.as_ref(), &ByteTokenizer, |_| ())
                    .unwrap_err(),
                IndexedDataset::open(url).unwrap_err(),
                config.run(&ByteTokenizer, |_| ()).unwrap_err(),
            ] {
                assert!(error.to_string().starts_with(&expected), "{error}");
            }
        }
    }
}
