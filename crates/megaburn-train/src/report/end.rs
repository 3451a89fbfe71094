//! The last lines of a run.

use megaburn_report::metrics::EvalMetrics;

use super::Reporter;
use crate::{error::TrainError, stop::StopReason};

impl Reporter<'_> {
    /// Reports that the run stopped, on request or because its metrics cannot be written, and was
    /// saved.
    ///
    /// # Errors
    /// The folder no longer belongs to the run.
    pub(crate) fn stopped(mut self, step: u64, reason: StopReason) -> Result<(), TrainError> {
        self.picture.finish(&self.folder);
        let written = self.metrics.finish();
        let saved = if step > 0 {
            ", saved"
        } else {
            "; there was nothing to save"
        };
        let next = match reason {
            StopReason::Step => "set a larger train.exit_at_step to continue",
            StopReason::Regroup => "the ranks continue with another number of hosts",
            _ => "the same command resumes from there",
        };
        self.console.line(format!(
            "stopped by {reason} after step {step}{saved}; {next}"
        ));
        self.console.finish();
        self.logs.finish(exit_code(&written));
        match &written {
            Ok(()) => self.alerts.stop(),
            Err(error) => self.alerts.fail(&error.to_string(), exit_code(&written)),
        }
        written
    }

    /// Prints the last lines of a finished run.
    ///
    /// # Errors
    /// The folder no longer belongs to the run.
    pub(crate) fn finish(
        mut self,
        step: u64,
        eval: Option<&EvalMetrics>,
        sample: Option<&str>,
    ) -> Result<(), TrainError> {
        let picture = self.picture.finish(&self.folder);
        let written = self.metrics.finish();
        let plural = if step == 1 { "" } else { "s" };
        let loss = eval.map(|EvalMetrics { eval_loss, .. }| {
            let bits = self.data.and_then(|data| data.bits_per_byte(*eval_loss));
            let bits = bits.map(|bits| format!(" = {bits:.3} bits per byte"));
            let bits = bits.unwrap_or_default();
            format!("; validation loss {eval_loss:.4}{bits}")
        });
        let loss = loss.unwrap_or_default();
        if let Some(sample) = sample {
            self.console
                .line(format!("sample   {}", sample.replace('\n', "\n         ")));
        }
        self.console
            .line(format!("finished {step} step{plural}{loss}"));
        if let Some(picture) = picture {
            self.console.line(format!("picture  {}", picture.display()));
        }
        self.console.line(format!(
            "run      {0} (metrics.jsonl, config.toml, checkpoints/); continue with `{1} \
            --resume {0} --steps N`",
            self.folder.path().display(),
            self.command,
        ));
        self.console.finish();
        self.logs.finish(exit_code(&written));
        match &written {
            Ok(()) => self.alerts.finish(eval.map(|eval| eval.eval_loss)),
            Err(error) => self.alerts.fail(&error.to_string(), exit_code(&written)),
        }
        written
    }

    /// Reports to the alerts and to the logs of other programs that the run failed.
    pub(crate) fn failed(self, error: &TrainError) {
        let code = error.exit().code();
        self.logs.finish(code);
        self.alerts.fail(&error.to_string(), code);
    }
}

/// The exit code of a run that ends with this result.
fn exit_code(result: &Result<(), TrainError>) -> u8 {
    result.as_ref().err().map_or(0, |error| error.exit().code())
}
