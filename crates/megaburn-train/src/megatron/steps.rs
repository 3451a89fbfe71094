//! The number of updates in the state of an optimizer.

use megaburn_torch::{
    DType,
    megatron::MegatronDir,
    pickle::{Kind, Value},
    pt::PtFile,
};

use super::error::MegatronError;

/// Dicts and lists between the state and a number of updates: optimizers, groups, keys.
const DEEPEST: usize = 6;

/// The number of updates that the optimizer has made: `step` of its groups, or `common_step`. The
/// groups are in `common.pt`, or next to the buckets of each rank.
///
/// # Errors
/// The checkpoint has no such number, or several that differ.
pub(super) fn num_updates(dir: &MegatronDir) -> Result<u64, MegatronError> {
    let missing = |why: &str| MegatronError::Missing {
        path: dir.dcp().path().join("common.pt"),
        what: "`step` of the optimizer".into(),
        why: why.into(),
    };
    let mut found = Vec::new();
    if let Some(state) = dir.common().root().get("optimizer") {
        collect(dir.common(), state, DEEPEST, &mut found)?;
    }
    for groups in dir.bucket_groups() {
        let groups = groups?;
        collect(&groups, groups.root(), DEEPEST, &mut found)?;
    }
    found.dedup();
    match found.as_slice() {
        [] => Err(missing("without it AdamW cannot correct its moments")),
        [number] if number.fract() == 0.0 && *number >= 0.0 => Ok(*number as u64),
        others => Err(missing(&format!(
            "it must be one number, but its groups have {others:?}"
        ))),
    }
}

fn collect(
    file: &PtFile,
    value: Value,
    depth: usize,
    found: &mut Vec<f64>,
) -> Result<(), MegatronError> {
    let Some(depth) = depth.checked_sub(1) else {
        return Ok(());
    };
    if let Kind::List(values) = value.kind() {
        return values
            .iter()
            .try_for_each(|value| collect(file, value, depth, found));
    }
    for (key, value) in value.entries().into_iter().flat_map(|all| all.iter()) {
        if !matches!(key.as_str(), Some("step" | "common_step")) {
            collect(file, value, depth, found)?;
        } else if let Some(number) = number(file, value)? {
            found.push(number);
        }
    }
    Ok(())
}

/// A number, or that of a tensor with one element.
fn number(file: &PtFile, value: Value) -> Result<Option<f64>, MegatronError> {
    if let Some(number) = value.as_f64() {
        return Ok(Some(number));
    }
    let Some(tensor) = file.tensor(value)? else {
        return Ok(None);
    };
    let bytes = file.read(&tensor)?;
    Ok(match (tensor.dtype(), bytes.as_slice()) {
        (DType::F32, &[a, b, c, d]) => Some(f64::from(f32::from_le_bytes([a, b, c, d]))),
        (DType::I64, bytes) => {
            let bytes = bytes.try_into().ok();
            bytes.map(|bytes| i64::from_le_bytes(bytes) as f64)
        }
        _ => None,
    })
}
