/// A hash as the manifest writes it.
pub(crate) fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}
