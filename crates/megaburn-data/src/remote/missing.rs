use std::path::Path;

use megaburn_store::is_url;

use crate::error::DataError;

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

    use crate::{
        corpus::Corpus, indexed::IndexedDataset, preprocess::PreprocessConfig,
        text_cache::TextCache, tokenizer::ByteTokenizer,
    };

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
