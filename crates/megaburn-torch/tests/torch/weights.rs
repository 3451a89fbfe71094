//! The weights of a model in a file of torch.save.

use std::collections::BTreeSet;

use megaburn_torch::pickle::{Pickle, Tree};
use megaburn_torch::pt::{PtFile, PtWriter, tensor_tree};

use crate::fixture;

fn names(file: &PtFile) -> BTreeSet<String> {
    let weights = file.weights().unwrap().into_iter();
    weights.map(|(name, _)| name).collect()
}

/// A file with these values, where the storage `0` has one byte.
fn written(values: &Tree) -> PtFile {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.pt");
    let mut writer = PtWriter::new(Vec::new(), values).unwrap();
    writer.storage("0", |out| out.write_all(&[7])).unwrap();
    std::fs::write(&path, writer.finish().unwrap()).unwrap();
    PtFile::open(&path).unwrap()
}

fn tensor() -> Tree {
    tensor_tree(megaburn_torch::DType::U8, &[1], "0").unwrap()
}

fn dict(entries: Vec<(&str, Tree)>) -> Tree {
    let entries = entries.into_iter();
    Tree::Dict(entries.map(|(key, value)| (key.into(), value)).collect())
}

#[test]
fn the_state_dict_of_a_training_program_is_found() {
    let model = || {
        dict(vec![
            ("a.weight", tensor()),
            ("b", dict(vec![("c", tensor())])),
        ])
    };
    let expected = BTreeSet::from(["a.weight".to_string(), "b.c".into()]);
    assert_eq!(names(&written(&model())), expected);
    for key in ["state_dict", "model_state_dict", "model", "module"] {
        let other = dict(vec![("state", dict(vec![("x", tensor())]))]);
        let file = written(&dict(vec![
            ("epoch", 3.into()),
            (key, model()),
            ("optimizer", other),
        ]));
        assert_eq!(names(&file), expected, "{key}");
    }
    // Names that begin with `model.` are no wrapper, nor is a key next to tensors or another key.
    let expected = |names: [&str; 2]| BTreeSet::from(names.map(String::from));
    let file = written(&dict(vec![
        ("model.a", tensor()),
        ("model", dict(vec![("b", tensor())])),
    ]));
    assert_eq!(names(&file), expected(["model.a", "model.b"]));
    let part = |name| dict(vec![(name, tensor())]);
    let file = written(&dict(vec![("model", part("a")), ("module", part("b"))]));
    assert_eq!(names(&file), expected(["model.a", "module.b"]));
}

/// A call whose result is dropped is found too, and so is what an object has as state.
#[test]
fn what_is_no_part_of_a_state_dict_is_named() {
    for (class, name) in [
        ("posix", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("numpy", "dtype"),
    ] {
        let trap = Tree::call(Tree::global(class, name), vec!["touch here".into()]);
        let file = written(&dict(vec![("a", tensor()), ("trap", trap)]));
        let error = file.weights().unwrap_err().to_string();
        let said = format!("its pickle names `{class}.{name}`, which is no part of a state dict");
        assert!(
            error.contains(&said) && error.contains("file.pt"),
            "{error}"
        );
        assert_eq!(
            file.tensors().unwrap().len(),
            1,
            "the tensors can be read by who asks for them"
        );
    }
    let pickle = Pickle::read(b"cposix\nsystem\n(X\x02\x00\x00\x00lstR0}.").unwrap();
    let found: Vec<String> = pickle.globals().map(|global| global.to_string()).collect();
    assert_eq!(found, ["posix.system"]);
    let long = "n".repeat(100_000);
    let trap = Tree::call(Tree::global(&long, "f"), vec![]);
    let error = written(&dict(vec![("a", trap)])).weights().unwrap_err();
    assert!(error.to_string().len() < 500);
    for name in ["module", "legacy-module"] {
        let file = PtFile::open(fixture(&format!("pt/{name}.pt"))).unwrap();
        let error = file.weights().unwrap_err().to_string();
        assert!(
            error.contains("`torch.nn.modules.linear.Linear`"),
            "{error}"
        );
    }
}

/// The names that PyTorch writes are all expected ones.
#[test]
fn files_with_nothing_but_tensors_are_accepted() {
    for name in ["zip", "legacy", "one", "zip64", "optimizer"] {
        let file = PtFile::open(fixture(&format!("pt/{name}.pt"))).unwrap();
        let count = file.tensors().unwrap().len();
        assert_eq!(file.weights().unwrap().len(), count, "{name}");
    }
}
