//! The classes and functions that the pickle of a state dict may name.

use crate::dtype::DType;
use crate::pickle::Global;

/// Whether a class or function is one that a state dict consists of: tensors, their storages and
/// types, and the containers of Python.
pub(super) fn is_expected(global: Global) -> bool {
    let Global { module, name } = global;
    let is_one_of = |names: &[&str]| names.contains(&name);
    match module {
        "collections" => is_one_of(&["OrderedDict", "defaultdict", "Counter"]),
        "builtins" => is_one_of(&[
            "set",
            "frozenset",
            "bytes",
            "bytearray",
            "dict",
            "list",
            "tuple",
        ]),
        "_codecs" => name == "encode",
        "torch" | "torch.cuda" => {
            is_one_of(&["Size", "Tensor", "device"])
                || DType::from_name(name).is_some()
                || name.ends_with("Storage")
        }
        "torch.storage" => is_one_of(&["UntypedStorage", "TypedStorage"]),
        "torch.nn.parameter" => name == "Parameter",
        "torch._utils" | "torch._tensor" => name.starts_with("_rebuild_"),
        "torch.serialization" => name == "_get_layout",
        _ => false,
    }
}
