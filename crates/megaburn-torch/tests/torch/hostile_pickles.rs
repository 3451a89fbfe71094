//! Damaged and hostile pickles are refused, without a panic and in little memory.

use megaburn_torch::pickle::{Pickle, Tree};
use proptest::prelude::*;

use crate::read;

fn refused(bytes: &[u8]) -> String {
    Pickle::read(bytes).unwrap_err().to_string()
}

#[test]
fn each_kind_of_damage_is_named() {
    let cases: [(&[u8], &str); 22] = [
        (b"", "at byte 0, the pickle is cut off"),
        (b"\x80\x06N.", "at byte 2, protocol 6 is unknown"),
        (b"N", "at byte 1, the pickle is cut off"),
        (b"N.N", "at byte 2, 1 bytes follow the end of the pickle"),
        (b".", "it uses a value that is not there"),
        (b"(.", "it uses a value that is not there"),
        (b"t.", "it uses a mark that is not there"),
        (b"\xff.", "0xff is no opcode"),
        (b"\x82\x01.", "it uses the extension registry"),
        (b"\x97.", "it has out-of-band buffers"),
        (b"h\x07.", "no value has the number 7"),
        (b"Nr\xff\xff\xff\xff.", "it numbers a value 4294967295"),
        (b"X\xff\xff\xff\xffab.", "the pickle is cut off"),
        (
            b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff.",
            "the pickle is cut off",
        ),
        (b"X\x01\x00\x00\x00\xff.", "a string is not valid UTF-8"),
        (b"(K\x01d.", "an entry of a dict has no value"),
        (b"NNa.", "it appends to a value that is no list"),
        (b"NNNs.", "it sets entries of a value that is no dict"),
        (b"NN\x93.", "the name of a class is no string"),
        (b"NNR.", "the arguments of an object are no tuple"),
        (b"NNb.", "it sets the state of a value that is no object"),
        (b"I12x\n.", "\"12x\" is no integer of at most 128 bits"),
    ];
    for (bytes, expected) in cases {
        let error = refused(bytes);
        assert!(
            error.ends_with(expected),
            "{}: {error}",
            bytes.escape_ascii()
        );
    }
}

/// Each line doubles what it stands for: the whole has 2^60 values, of which the pickle has 60.
#[test]
fn shared_values_are_not_copied() {
    let mut bytes = b"]q\x00".to_vec();
    for index in 0..60 {
        bytes.extend([b'h', index, b'h', index, 0x86, b'q', index + 1]);
    }
    bytes.push(b'.');
    let pickle = Pickle::read(&bytes).unwrap();
    assert!(pickle.root().to_string().len() < 2000);
    assert!(format!("{pickle:?}").len() < 2000);
    assert_eq!(Tree::copy_of(pickle.root(), 100_000), None);
}

/// Nothing recurses: neither reading nor dropping uses the stack.
#[test]
fn depth_is_no_danger() {
    let mut bytes = vec![b'N'];
    bytes.extend([0x85; 1_000_000]);
    bytes.push(b'.');
    let pickle = Pickle::read(&bytes).unwrap();
    assert_eq!(pickle.root().to_string(), "((((((((...))))))))");
    assert_eq!(Tree::copy_of(pickle.root(), 100_000), None);
}

#[test]
fn a_long_name_is_stored_once() {
    let name = "n".repeat(100_000);
    let mut bytes = b"X\xa0\x86\x01\x00".to_vec();
    bytes.extend(name.bytes());
    bytes.extend(b"q\x00(");
    for _ in 0..100_000 {
        bytes.extend(b"h\x00h\x00\x93");
    }
    bytes.extend(b"t.");
    // Copies of the name would take 20 GB.
    let pickle = Pickle::read(&bytes).unwrap();
    assert_eq!(pickle.root().sequence().unwrap().len(), 100_000);
}

/// Every prefix of a pickle is cut off, which the error says.
#[test]
fn a_pickle_that_is_cut_says_so() {
    for protocol in 0..6 {
        let bytes = read(&format!("pickles/protocol{protocol}.pkl"));
        for len in 0..bytes.len() {
            let error = Pickle::read(&bytes[..len]).unwrap_err();
            assert!(error.is_truncated(), "{len}: {error}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Changed bytes, opcodes above all, are read or refused.
    #[test]
    fn no_damage_is_a_panic(
        protocol in 0..6,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = read(&format!("pickles/protocol{protocol}.pkl"));
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok((pickle, _)) = Pickle::read_first(&bytes) {
            prop_assert!(pickle.root().to_string().len() < 100_000);
            let _ = Tree::copy_of(pickle.root(), 10_000);
        }
    }

    /// So are random programs.
    #[test]
    fn no_program_is_a_panic(
        program in prop::collection::vec(
            prop::sample::select(&b"(.012NK\x01h\x00q\x00]})\x8f\x94\x93\x91\x90R\x81boaeltdusQX\x00\x85\x86"[..]),
            0..200,
        ),
    ) {
        let _ = Pickle::read(&program).map(|pickle| pickle.root().to_string());
    }
}
