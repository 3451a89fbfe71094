//! Pickles of all protocols mean what Python meant, and Python reads what is written here.

use megaburn_torch::pickle::{Kind, Pickle, Tree, Value, write_pickle};

use crate::read;

fn ints(value: Value) -> Vec<i64> {
    let values = value.sequence().unwrap().iter();
    values.map(|value| value.as_i64().unwrap()).collect()
}

fn big(value: Value) -> i128 {
    match value.kind() {
        Kind::BigInt(digits) => {
            let sign = if digits[digits.len() - 1] < 0x80 {
                0
            } else {
                0xff
            };
            let mut bytes = [sign; 16];
            bytes[..digits.len()].copy_from_slice(digits);
            i128::from_le_bytes(bytes)
        }
        other => panic!("{other:?}"),
    }
}

/// What is in `tests/fixtures/torch/pickles`.
fn check(root: Value) {
    let get = |name: &str| root.get(name).unwrap_or_else(|| panic!("no {name}"));
    assert!(get("none").is_none());
    let bools = get("bools").sequence().unwrap();
    let bools: Vec<_> = bools.iter().map(|value| value.as_bool()).collect();
    assert_eq!(bools, [Some(true), Some(false)]);
    let small = [0, -1, 255, 256, 65535, 65536];
    let wide = [(1 << 31) - 1, 1 << 31, -(1 << 31), i64::MAX, i64::MIN];
    assert_eq!(ints(get("ints")), [&small[..], &wide].concat());
    let large = get("large").sequence().unwrap().iter();
    let above = i128::from(i64::MAX) + 1;
    assert_eq!(
        large.map(big).collect::<Vec<_>>(),
        [above, 2 * above, -above - 1]
    );
    let floats = get("floats").sequence().unwrap().iter();
    let floats: Vec<u64> = floats
        .map(|value| value.as_f64().unwrap().to_bits())
        .collect();
    let expected = [0.5, -0.0, f64::INFINITY, f64::NEG_INFINITY, 1e300];
    assert_eq!(floats, expected.map(f64::to_bits));
    let text = "größer\n\\ '\" \u{20ac} \u{1f600} \0";
    assert_eq!(get("text").as_str(), Some(text));
    assert_eq!(get("long text").as_str(), Some(&*"x".repeat(300)));
    let bytes: Vec<u8> = (0..=255).collect();
    assert_eq!(get("bytes").as_bytes().unwrap(), bytes);
    assert_eq!(&*get("no bytes").as_bytes().unwrap(), b"");
    assert_eq!(&*get("bytearray").as_bytes().unwrap(), b"\x00\xff");
    let tuples = get("tuples").sequence().unwrap().iter().map(ints);
    let expected: Vec<Vec<i64>> = (0..5).map(|len| (1..=len).collect()).collect();
    assert_eq!(tuples.collect::<Vec<_>>(), expected);
    assert_eq!(ints(get("set")), [5]);
    assert_eq!(ints(get("frozenset")), [6]);
    let shared = get("shared").sequence().unwrap();
    assert_eq!(shared.get(0).unwrap().id(), shared.get(1).unwrap().id());
    assert_eq!(ints(shared.get(1).unwrap()), [1, 2]);
    let cycle = get("cycle");
    let inner = cycle.sequence().unwrap().get(0).unwrap();
    assert_eq!(cycle.id(), inner.id());
    assert_eq!(
        get("class").as_global().unwrap().to_string(),
        "collections.OrderedDict"
    );
    assert_eq!(
        get("function").as_global().unwrap().to_string(),
        "builtins.len"
    );
    let keys = root.entries().unwrap().iter().map(|(key, _)| key);
    let keys: Vec<_> = keys.filter_map(|key| key.as_i64()).collect();
    assert_eq!(keys, [3]);
}

#[test]
fn all_protocols_mean_the_same() {
    for protocol in 0..6 {
        let pickle = Pickle::read(&read(&format!("pickles/protocol{protocol}.pkl"))).unwrap();
        let root = pickle.root();
        check(root);
        let ordered = root.get("ordered").unwrap().entries().unwrap().iter();
        let ordered: Vec<_> = ordered
            .map(|(key, value)| (key.as_str().unwrap(), value.as_i64().unwrap()))
            .collect();
        assert_eq!(ordered, [("b", 1), ("a", 2)]);
        let plain = root.get("plain").unwrap();
        assert_eq!(plain.attribute("width").unwrap().as_i64(), Some(7));
        assert_eq!(plain.attribute("name").unwrap().as_str(), Some("wide"));
        assert_eq!(plain.attribute("depth").map(|value| value.id()), None);
        let shown = plain.to_string();
        let ends = "state {\"width\": 7, \"name\": \"wide\"}";
        assert!(shown.ends_with(ends), "{shown}");
        assert!(root.get("cycle").unwrap().to_string().contains("..."));
    }
}

/// A tree with everything that can be written.
fn tree() -> Tree {
    let class = Tree::global("somewhere", "Plain");
    let ints = [0, -1, 255, 256, 1 << 31, i64::MAX, i64::MIN].map(Tree::Int);
    Tree::Dict(vec![
        ("none".into(), Tree::None),
        ("bools".into(), Tree::List(vec![true.into(), false.into()])),
        ("ints".into(), Tree::Tuple(ints.to_vec())),
        (
            "floats".into(),
            Tree::Tuple(vec![0.1.into(), (-0.0).into()]),
        ),
        (3.into(), Tree::Bytes((0..=255).collect())),
        (
            "texts".into(),
            Tree::List(vec!["ö\0€".into(), "ö\0€".into()]),
        ),
        ("tuples".into(), Tree::Tuple(vec![Tree::Tuple(vec![]); 3])),
        (
            "plain".into(),
            Tree::object(class.clone(), [("width", 7.into())]),
        ),
        ("call".into(), Tree::call(class, vec![1.into()])),
        ("stored".into(), Tree::Persistent(Box::new("key".into()))),
    ])
}

#[test]
fn what_is_written_is_read_back() {
    let tree = tree();
    let pickle = Pickle::read(&write_pickle(&tree).unwrap()).unwrap();
    assert_eq!(Tree::copy_of(pickle.root(), 1000), Some(tree));
    assert_eq!(Tree::copy_of(pickle.root(), 20), None);
}

/// A name with a line break would be followed by opcodes of whoever chose it.
#[test]
fn a_name_with_a_line_break_is_not_written() {
    for (module, name) in [("a\nb", "c"), ("a", "b\nc")] {
        let tree = Tree::List(vec![Tree::global(module, name)]);
        let error = write_pickle(&tree).unwrap_err().to_string();
        assert!(error.contains("has a line break"), "{error}");
    }
}
