//! What a run reports, without its trainer.
//!
//! - [`Console`](console::Console) prints the progress of a run: a bar on a terminal, plain lines
//!   elsewhere.
//! - [`metrics`] has the measurements of each step, and `metrics.jsonl`, which records them.
//! - [`logs`] has them in the formats of TensorBoard, Weights & Biases, Prometheus and
//!   spreadsheets.
//! - [`alerts`] tells a command or a webhook what happens to a run.
//! - [`loss_plot`] plots the loss as SVG, [`length_plot`] the lengths of documents.
//! - [`describe_layout`] describes a layout in a line.
//! - [`profile`] records what ranks do in some steps, and says where the time went.
//!
//! ```
//! use megaburn_report::{
//!     loss_plot,
//!     metrics::{EvalMetrics, MetricsRecord, MetricsWriter, StepMetrics, read_metrics},
//! };
//!
//! # let path = std::env::temp_dir().join(format!("metrics-{}.jsonl", std::process::id()));
//! let mut writer = MetricsWriter::open(&path, 0, "1f")?;
//! writer.write(StepMetrics { step: 1, loss: 5.5, ..StepMetrics::default() })?;
//! writer.write(EvalMetrics { step: 1, eval_loss: 5.25, ..EvalMetrics::default() })?;
//!
//! let records = read_metrics(&path)?;
//! assert!(matches!(records[1], MetricsRecord::Eval(_)));
//! assert!(loss_plot("my run", &records)?.starts_with("<svg"));
//! # std::fs::remove_file(&path).unwrap();
//! # Ok::<(), megaburn_report::ReportError>(())
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]
// These macros panic if their output cannot be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod alerts;
pub mod console;
mod error;
mod layout;
pub mod logs;
mod loss_window;
pub mod metrics;
mod plot;
pub mod profile;
pub mod scaling_law;

pub use error::ReportError;
pub use layout::describe_layout;
pub use loss_window::LossWindow;
pub use plot::{Series, SeriesPlot, length_plot, loss_plot, series_plot};
