//! Options are arguments or belong to a device: except where it is listed, no code behaves differently
//! by what a caller has set for its thread.

use std::{collections::BTreeSet, fs};

use super::rules::{root, visit};

/// The files that may have a `thread_local!`, and why. This list may only shrink.
const ALLOWED: [(&str, &str); 7] = [
    (
        "crates/megaburn-autograd/src/main_grad.rs",
        "Burn's backward passes no argument to a node, which must know that it recomputes",
    ),
    (
        "crates/megaburn-autograd/src/wgrad_queue.rs",
        "Burn's backward passes no argument to a node, which must know where to defer its product",
    ),
    (
        "crates/megaburn-cuda/src/cudnn/library.rs",
        "a handle of cuDNN belongs to the thread of its device",
    ),
    (
        "crates/megaburn-cuda/src/gemm/library.rs",
        "a handle of cuBLASLt belongs to the thread of its device",
    ),
    (
        "crates/megaburn-cuda/src/host/staged.rs",
        "pinned memory belongs to the thread of its device",
    ),
    (
        "crates/megaburn-cuda/src/queue.rs",
        "cloning the handle of a device takes no lock",
    ),
    (
        "cubecl-kernels/src/quantized/launch/cells.rs",
        "memory that a kernel has set belongs to the stream of the thread",
    ),
];

#[test]
fn thread_locals_hold_no_options() {
    let mut found = BTreeSet::new();
    for folder in ["crates", "cubecl-kernels", "examples"] {
        visit(&root().join(folder), &mut |path| {
            let source = fs::read_to_string(path).unwrap();
            if source.contains("thread_local!") {
                let path = path.strip_prefix(root()).unwrap();
                found.insert(path.display().to_string());
            }
        });
    }
    let allowed: BTreeSet<String> = ALLOWED.iter().map(|(path, _)| path.to_string()).collect();
    let unknown: Vec<_> = found.difference(&allowed).collect();
    assert!(
        unknown.is_empty(),
        "pass it as an argument, or let it belong to the device: {unknown:#?}"
    );
    let gone: Vec<_> = allowed.difference(&found).collect();
    assert!(
        gone.is_empty(),
        "these have none; remove them from the list: {gone:#?}"
    );
}
