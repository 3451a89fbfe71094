//! Why a run cannot continue from its checkpoint. The advice that loses nothing comes first.

use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why a run cannot be resumed.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(
    missing_docs,
    reason = "the error message of each variant describes its fields"
)]
pub enum ResumeError {
    #[error("checkpoint `{}` {what}; {}", path.display(), advice(path))]
    Other { path: PathBuf, what: String },
    #[error(
        "checkpoint `{}` {what}; {}. To start another run from its weights alone: --init {} \
        --set run.dir=...",
        path.display(), resume_advice(path), path.display()
    )]
    OtherOptimizer { path: PathBuf, what: String },
    #[error(
        "checkpoint `{}` {what}; start another run with --set run.dir=... (--fresh replaces this one)",
        path.display()
    )]
    OtherTask { path: PathBuf, what: String },
    #[error(
        "checkpoint `{}` is damaged, and no other checkpoint is intact: {why}; start another run \
        with --set run.dir=..., or replace this one with --fresh",
        path.display()
    )]
    AllDamaged { path: PathBuf, why: String },
    #[error(
        "only the checkpoint `{}` is left of the run, and it may hold wrong values, because the memory of \
        a rank failed: bring back an older one, or start anew with --fresh. To use it all the same, \
        remove `.suspect-..` from its name",
        path.display()
    )]
    OnlySuspect { path: PathBuf },
    #[error(
        "the run has saved step {step}, but {place} has no checkpoint now; restore it, or start \
        anew with --fresh"
    )]
    NoneFound { step: u64, place: String },
    #[error(
        "checkpoint `{}` was written by run {writer}, which used the same train.local_checkpoint_dir: \
        choose another one, or continue that run with its own run.dir (if that is lost, with its \
        run_id in `{}`)",
        path.display(), marker.display()
    )]
    OfOtherRun {
        path: PathBuf,
        writer: String,
        marker: PathBuf,
    },
    #[error(
        "checkpoint `{}` is the newest and was written by {writer}, but this run has its own \
        checkpoints up to step {step}: to resume from those, move it out of the folder; to start \
        from it, start another run with --init and --set run.dir=...",
        path.display()
    )]
    NotOwn {
        path: PathBuf,
        writer: String,
        step: u64,
    },
    #[error(
        "the run `{}` {}, so it cannot start from `{given}` now; continue it with `megaburn \
        train --resume {}`, or start another run from `{given}` with --set run.dir=... (--fresh \
        replaces this one)",
        run.display(), began(recorded), run.display()
    )]
    OtherInit {
        run: PathBuf,
        recorded: RecordedInit,
        given: String,
    },
    #[error("`{}` is not a run that can be resumed: it has no config.toml; give the folder of a \
            run", path.display())]
    NoRun { path: PathBuf },
}

/// The recorded `model.init` of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordedInit {
    /// The run started from this model.
    From(String),
    /// The run started from fresh weights.
    Fresh,
    /// Nothing is recorded: an older version wrote the checkpoint, and there is no `config.toml`.
    Unknown,
}

fn began(recorded: &RecordedInit) -> String {
    match recorded {
        RecordedInit::From(init) => format!("has checkpoints and started from `{init}`"),
        RecordedInit::Fresh => "has checkpoints and started from no other model".to_string(),
        RecordedInit::Unknown => {
            "has checkpoints and does not record what it started from".to_string()
        }
    }
}

/// Advice for a checkpoint that does not match the command.
fn advice(checkpoint: &Path) -> String {
    let resume_advice = resume_advice(checkpoint);
    format!(
        "{resume_advice}, or start another run with --set run.dir=... (--fresh replaces this one)"
    )
}

fn resume_advice(checkpoint: &Path) -> String {
    let run = checkpoint
        .parent()
        .and_then(Path::parent)
        .unwrap_or(checkpoint)
        .display();
    format!("continue it with `megaburn train --resume {run}`, which needs no other flag")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_harmless_way_comes_first() {
        let path = PathBuf::from("runs/a/checkpoints/step-00000007");
        let what = "is from another model: vocab is 2048 there and 260 here".to_string();
        let error = ResumeError::Other { path, what }.to_string();
        let places = ["megaburn train --resume runs/a`", "run.dir=...", "--fresh"];
        let places = places.map(|text| error.find(text).unwrap());
        assert!(places.is_sorted(), "{error}");
        let path = PathBuf::from("runs/a/checkpoints/step-00000007");
        let what = "was trained with another optimizer".to_string();
        let error = ResumeError::OtherOptimizer { path, what }.to_string();
        let places = [
            "--resume runs/a`",
            "--init runs/a/checkpoints/step-00000007 ",
        ];
        let places = places.map(|text| error.find(text).unwrap());
        assert!(places.is_sorted() && !error.contains("--fresh"), "{error}");
        let run = PathBuf::from("runs/a");
        let given = "models/b".to_string();
        let error = ResumeError::OtherInit {
            run,
            recorded: RecordedInit::From("models/a".into()),
            given,
        };
        let error = error.to_string();
        assert!(error.contains("started from `models/a`"), "{error}");
        let run = PathBuf::from("runs/a");
        let given = "models/b".to_string();
        let recorded = RecordedInit::Unknown;
        let unknown = ResumeError::OtherInit {
            run,
            recorded,
            given,
        }
        .to_string();
        assert!(
            unknown.contains("does not record what it started from"),
            "{unknown}"
        );
        assert!(
            error.find("--resume runs/a") < error.find("--fresh"),
            "{error}"
        );
    }
}
