use std::{
    collections::BTreeMap,
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use megaburn_collective::{Phase, ProcessGroups, Progress, objects};
use megaburn_mesh::ShardSpec;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    agree::settle,
    atomic_dir::AtomicDir,
    chunks::CHUNK,
    error::{CheckpointError, IoContext},
    folder::step_path,
    hex::hex,
    manifest::{FORMAT, FileInfo, MANIFEST, MANIFEST_HASH, Manifest, TensorInfo},
    named_tensor::NamedTensor,
    paths::sync_dir,
    retention::retain,
    write::write_rank_file,
};

/// The contents of a checkpoint other than tensors. Rank 0's snapshot is written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The run that writes the checkpoint; stored in the manifest.
    pub run_id: Option<String>,
    /// Updates done.
    pub step: u64,
    /// The model's configuration.
    pub model: Value,
    /// Other state that the trainer needs to resume exactly.
    pub trainer: Value,
}

/// Returns an error if the folder of checkpoints must not be written to, for instance because
/// another run uses it. Rank 0 calls it before the first byte is written and before the commit.
pub type Guard<'a> = &'a dyn Fn() -> Result<(), String>;

/// What a rank wrote.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    tensors: BTreeMap<String, TensorInfo>,
    file: Option<FileInfo>,
}

/// Saves a checkpoint to `dir/step-XXXXXXXX` and returns that path. A checkpoint of the same step
/// is replaced. With a `guard`, the folder `dir` must exist and is not created.
///
/// Afterwards only the newest `keep` checkpoints of the run that `snapshot` names remain (0 keeps
/// all). Before older ones are deleted, the ranks verify the remaining ones, each once per process.
///
/// Every element is written once, by the rank that owns it at data- and context-parallel coordinate
/// 0, or for experts at expert-data-parallel coordinate 0 ([`is_written_by`]). Only that rank's
/// values are requested, one tensor at a time.
///
/// # Errors
/// Any rank's failure or the guard's refusal, on every rank. The older checkpoints are then
/// unchanged, and nothing of the new one remains. Tensors that the ranks' pieces do not tile
/// exactly once are refused.
/// # Collective
/// All ranks of `groups.world`; a few messages, none with tensors. Each rank enters [`Phase::Save`]
/// and reports its progress.
pub fn save<'a>(
    dir: &Path,
    keep: usize,
    guard: Option<Guard<'_>>,
    groups: &ProcessGroups,
    snapshot: &Snapshot,
    tensors: impl IntoIterator<Item = NamedTensor<'a>>,
) -> Result<PathBuf, CheckpointError> {
    let world = &groups.world;
    let phase = world.phase(Phase::Save);
    let check = || {
        let guarded = guard.map_or(Ok(()), |guard| guard());
        guarded.map_err(|why| CheckpointError::Guarded {
            path: dir.to_path_buf(),
            why,
        })
    };
    let target = step_path(dir, snapshot.step);
    let create = || match guard {
        Some(_) => check().and_then(|()| AtomicDir::inside(&target)),
        None => AtomicDir::create(&target),
    };
    let staging = groups.is_main().then(create).transpose();
    let staging = settle(world, staging)?;
    // Only the name is sent, because ranks on other hosts may see the folder under another path.
    let name = staging
        .as_ref()
        .and_then(|staging| staging.path.file_name());
    let name: Option<String> =
        objects::broadcast(world, &name.map(|name| name.to_string_lossy().into_owned()))?;
    let name = name.expect("rank 0 created the folder");
    let tensors = tensors
        .into_iter()
        .filter(|tensor| is_written_by(groups, tensor.shard));
    let mine = write_share(&dir.join(name), world.rank(), tensors, phase.progress());
    let mine = settle(world, mine)?;
    let reports = objects::gather(world, &mine)?;

    let committed = staging.map(|staging| {
        let manifest = merge(snapshot, groups.layout().to_string(), reports)?;
        write_manifest(&staging.path, &manifest)?;
        // Check a second time, because another run may have started during the write.
        check()?;
        staging.commit()
    });
    let is_main = settle(world, committed.transpose())?.is_some();
    let run_id = snapshot.run_id.as_deref();
    let step = snapshot.step;
    if let Err(error) = retain(world, dir, run_id, step, keep, phase.progress())
        && is_main
    {
        tracing::warn!("old checkpoints were not deleted: {error}");
    }
    Ok(step_path(dir, snapshot.step))
}

/// Whether this rank writes what it owns of a tensor, i.e. whether [`save`] requests its values.
pub fn is_written_by(groups: &ProcessGroups, shard: &ShardSpec) -> bool {
    let coords = &groups.coords;
    if shard.is_expert() {
        coords.edp == 0
    } else {
        coords.dp == 0 && coords.cp == 0
    }
}

pub(crate) fn write_share<'a>(
    folder: &Path,
    rank: usize,
    tensors: impl IntoIterator<Item = NamedTensor<'a>>,
    progress: &Progress,
) -> Result<Report, CheckpointError> {
    let tensors: Vec<_> = tensors.into_iter().collect();
    let mut report = Report::default();
    for tensor in &tensors {
        let name = tensor.name.clone();
        let refuse = |why: &str| CheckpointError::Untiled {
            name: name.clone(),
            why: why.into(),
        };
        // The key of a piece is its tensor's name, `#` and its start.
        if name.contains('#') {
            return Err(refuse("its name contains a `#`"));
        }
        let global_shape = tensor.shard.global_shape.clone();
        let info = TensorInfo {
            dtype: tensor.file_dtype()?,
            global_shape,
        };
        if report.tensors.insert(name.clone(), info).is_some() {
            return Err(refuse("it is given twice"));
        }
    }
    report.file = write_rank_file(
        folder,
        &format!("rank-{rank:05}.safetensors"),
        tensors,
        progress,
    )?;
    Ok(report)
}

pub(crate) fn merge(
    snapshot: &Snapshot,
    layout: String,
    reports: Vec<Report>,
) -> Result<Manifest, CheckpointError> {
    let mut tensors: BTreeMap<String, TensorInfo> = BTreeMap::new();
    let mut files = Vec::new();
    for report in reports {
        for (name, info) in report.tensors {
            let known = tensors.entry(name.clone()).or_insert_with(|| info.clone());
            if *known != info {
                let why = format!("ranks disagree about it: {known:?} and {info:?}");
                return Err(CheckpointError::Untiled { name, why });
            }
        }
        files.extend(report.file);
    }
    let Snapshot {
        run_id,
        step,
        model,
        trainer,
    } = snapshot.clone();
    let format = FORMAT;
    let chunk_bytes = Some(CHUNK);
    let manifest = Manifest {
        format,
        run_id,
        step,
        layout,
        model,
        trainer,
        tensors,
        files,
        chunk_bytes,
    };
    let refuse = |(name, why)| CheckpointError::Untiled { name, why };
    manifest.check().map_err(refuse)?;
    Ok(manifest)
}

pub(crate) fn write_manifest(folder: &Path, manifest: &Manifest) -> Result<(), CheckpointError> {
    let text = serde_json::to_vec_pretty(manifest).expect("a manifest is serializable");
    let hash = hex(xxh3_64(&text));
    for (name, bytes) in [
        (MANIFEST, text.as_slice()),
        (MANIFEST_HASH, hash.as_bytes()),
    ] {
        let path = folder.join(name);
        let write = || {
            let mut file = File::create(&path)?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        write().during("write", &path)?;
    }
    sync_dir(folder)
}
