//! `megaburn checkpoint prune`.

use std::{
    collections::BTreeMap,
    num::{NonZeroU64, NonZeroUsize},
    path::{Path, PathBuf},
};

use clap::Args;
use megaburn_checkpoint::{PrunePlan, Retention, bytes_to_examine, checkpoints_of, plan_prune};
use megaburn_report::metrics::{MetricsRecord, read_metrics};
use megaburn_train::{IdleRun, TrainError};
use serde_json::json;

use super::{super::print, place::refused, progress::ReadProgress, units::counted};

#[derive(Args)]
pub(in crate::cli) struct PruneArgs {
    /// The folder of a run that is not in progress.
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Number of the newest intact checkpoints that stay.
    #[arg(long, value_name = "N")]
    keep: NonZeroUsize,
    /// Checkpoints whose step is a multiple of K stay, too.
    #[arg(long, value_name = "K")]
    keep_every: Option<NonZeroU64>,
    /// The B checkpoints of the lowest validation loss stay, too.
    #[arg(long, value_name = "B")]
    keep_best: Option<NonZeroUsize>,
    /// Delete the others. Without this flag, they are only listed.
    #[arg(long)]
    yes: bool,
    /// Print only JSON on stdout: one object per line, for each checkpoint of the run.
    #[arg(long)]
    json: bool,
}

impl PruneArgs {
    /// Deletes, or lists what it would delete; whether no checkpoint of the run was found damaged.
    pub(super) fn run(self) -> Result<bool, TrainError> {
        // The folder is held only while checkpoints are deleted: verifying takes long, and a run
        // that starts meanwhile would be refused.
        let idle = IdleRun::take(&self.run)?;
        let (checkpoints, run_id) = (idle.checkpoints(), idle.run_id().to_string());
        drop(idle);
        let plan = self.plan(&checkpoints, &run_id)?;
        if self.yes {
            let _held = IdleRun::take(&self.run)?;
            plan.delete()?;
        }
        self.print(&plan)?;
        Ok(plan.damaged.is_empty())
    }

    fn plan(&self, checkpoints: &Path, run_id: &str) -> Result<PrunePlan, TrainError> {
        let retention = Retention {
            newest: self.keep.get(),
            every: self.keep_every.map_or(0, NonZeroU64::get),
            best: self.keep_best.map_or(0, NonZeroUsize::get),
            losses: match self.keep_best {
                Some(_) => self.losses()?,
                None => BTreeMap::new(),
            },
            ..Retention::default()
        };
        let own = checkpoints_of(checkpoints, run_id)?;
        let others = retention.kept(own.iter().map(|(step, _)| *step));
        let read = own.iter().enumerate();
        let read =
            read.filter(|(number, (step, _))| *number < retention.newest || others.contains(step));
        let bytes = read.map(|(_, (_, path))| bytes_to_examine(path)).sum();
        let mut progress = ReadProgress::new(bytes);
        let mut on_bytes = |bytes| progress.add(bytes);
        Ok(plan_prune(checkpoints, run_id, &retention, &mut on_bytes)?)
    }

    /// The loss on the first validation data set at the steps at which the run was evaluated, as the
    /// run itself chooses its best checkpoints.
    fn losses(&self) -> Result<BTreeMap<u64, f64>, TrainError> {
        let path = self.run.join("metrics.jsonl");
        let records = read_metrics(&path)?.into_iter();
        let evals = records.filter_map(|record| match record {
            MetricsRecord::Eval(eval) => Some(eval),
            _ => None,
        });
        let evals: Vec<_> = evals.collect();
        let Some(first) = evals.first() else {
            return Err(refused(&path, "has no evaluation, which --keep-best needs"));
        };
        let own = evals.iter().filter(|eval| eval.data == first.data);
        Ok(own.map(|eval| (eval.step, eval.eval_loss)).collect())
    }

    fn print(&self, plan: &PrunePlan) -> Result<(), TrainError> {
        let deleted = if self.yes { "deleted" } else { "would delete" };
        let rows = [("kept", &plan.kept), (deleted, &plan.deleted)];
        for (action, rows) in rows {
            for (step, path) in rows {
                let path = path.display();
                match self.json {
                    true => print::result(json!({
                        "step": step,
                        "path": path.to_string(),
                        "action": action.replace(' ', "_"),
                    }))?,
                    false => print::result(format!("{action:12}  {path}"))?,
                }
            }
        }
        for refused in &plan.damaged {
            let path = refused.path.display();
            match self.json {
                true => print::result(json!({
                    "path": path.to_string(),
                    "action": "damaged",
                    "why": refused.why,
                }))?,
                false => print::result(format!("damaged       {path}: {}", refused.why))?,
            }
        }
        if self.json {
            return Ok(());
        }
        if plan.num_others > 0 {
            let others = counted(plan.num_others, "checkpoint");
            print::result(format!(
                "{others} that another run or a conversion wrote, or with files that are \
                incomplete, stay as they are"
            ))?;
        }
        if !self.yes && !plan.deleted.is_empty() {
            print::result("nothing was deleted: add --yes to delete")?;
        }
        Ok(())
    }
}
