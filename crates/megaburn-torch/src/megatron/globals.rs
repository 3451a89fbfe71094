use crate::error::TorchError;
use crate::pickle::Global;
use crate::pt::PtFile;

/// Refuses a `common.pt` whose pickle names a class or function that is no part of one. A copy of
/// its values would make the program that loads the copy execute it.
///
/// Source: Megatron-Core, `megatron/core/safe_globals.py`.
///
/// # Errors
/// The pickle names such a class or function, whether it calls it or not.
pub fn check_globals(common: &PtFile) -> Result<(), TorchError> {
    let Some(name) = common.strange_global(is_known) else {
        return Ok(());
    };
    Err(TorchError::OtherKind {
        path: common.path().into(),
        why: format!(
            "its pickle names `{name}`, which is no part of a checkpoint of Megatron-Core; nothing \
            of the file was executed, and nothing of it is used"
        ),
    })
}

/// Whether `common.pt` may name a class in addition to the classes of a state dict.
fn is_known(global: Global) -> bool {
    let Global { module, name } = global;
    let is_one_of = |names: &[&str]| names.contains(&name);
    match module {
        "argparse" => name == "Namespace",
        "types" => name == "SimpleNamespace",
        "collections" => name == "deque",
        "signal" => name == "Signals",
        "pathlib" => is_one_of(&["PosixPath", "PurePosixPath"]),
        "builtins" => is_one_of(&["int", "float", "bool", "str"]),
        "megatron.core.rerun_state_machine" => {
            is_one_of(&["RerunMode", "RerunState", "RerunDiagnostic"])
        }
        // Modules of this name define enums and nothing else; what they import has a small letter.
        _ => {
            let inner = module.strip_prefix("megatron.core.");
            inner.is_some_and(|inner| inner == "enums" || inner.ends_with(".enums"))
                && name.starts_with(|first: char| first.is_ascii_uppercase())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_classes_of_a_checkpoint_are_known() {
        for (module, name, expected) in [
            ("argparse", "Namespace", true),
            ("argparse", "FileType", false),
            ("signal", "Signals", true),
            ("signal", "raise_signal", false),
            ("megatron.core.enums", "ModelType", true),
            ("megatron.core.transformer.enums", "AttnBackend", true),
            ("megatron.core.transformer.enums", "enum", false),
            ("megatron.core.utils", "Popen", false),
            ("megatron.enums", "ModelType", false),
            ("builtins", "eval", false),
            ("os", "system", false),
        ] {
            assert_eq!(
                is_known(Global { module, name }),
                expected,
                "{module}.{name}"
            );
        }
    }
}
