//! Tests that encoding a corpus on many threads gives the same tokens as on one thread.

use megaburn_data::{Corpus, TokenDataset, Tokenizer};

use crate::{FIXTURES, fixture};

/// A text of about `bytes` bytes: lines of words, whose counts are drawn from `seed`.
fn text(bytes: usize, mut seed: u64) -> String {
    const WORDS: [&str; 9] = [
        "river",
        "the",
        "boats'",
        "größer",
        "今日",
        "let x = 1;",
        "it's",
        "\t",
        "12345",
    ];
    let mut text = String::new();
    while text.len() < bytes {
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        text += WORDS[(seed >> 33) as usize % WORDS.len()];
        text += if (seed >> 40).is_multiple_of(7) {
            "\n"
        } else {
            " "
        };
        if (seed >> 45).is_multiple_of(31) {
            text += "\n    ";
        }
    }
    text
}

fn tokens(set: &TokenDataset) -> Vec<u32> {
    set.sample(set.num_tokens() as usize - 1, 0).unwrap()
}

#[test]
fn long_documents_in_pieces_are_the_documents_whole() {
    let documents = vec![
        text(300_000, 1),
        "short".into(),
        text(70_000, 2),
        "a".repeat(150_000),
    ];
    let corpus = Corpus::from_documents("t", documents.clone()).unwrap();
    for name in FIXTURES {
        let tokenizer = fixture(name);
        let mut whole = Vec::new();
        for document in &documents {
            whole.push(tokenizer.eos());
            whole.extend(tokenizer.encode(document).unwrap());
        }
        let set = TokenDataset::new(&corpus, &tokenizer).unwrap();
        assert!(tokens(&set) == whole[1..], "{name}");
    }
}

#[test]
fn documents_of_more_than_one_batch_come_in_order() {
    let documents: Vec<String> = (0..20).map(|i| text(900_000 + i as usize, i)).collect();
    let corpus = Corpus::from_documents("t", documents).unwrap();
    assert!(corpus.num_bytes().unwrap() > 1 << 24);
    let tokenizer = fixture("byte-level");
    let set = TokenDataset::new(&corpus, &tokenizer).unwrap();
    let whole = tokens(&set);
    let parts: Vec<&[u32]> = whole.split(|&id| id == tokenizer.eos()).collect();
    assert_eq!(parts.len(), corpus.documents().len());
    for index in [0, 17, 18, 19] {
        assert!(
            tokenizer.decode(parts[index]) == corpus.documents()[index],
            "{index}"
        );
    }
}
