//! The `megaburn` command, and the flags of a training run, which applications share.

mod convert;
mod device;
mod generate;
mod hint;
mod interrupt;
mod launch;
mod plan;
mod print;
mod tokenize;
mod train;
mod verify;

use std::{ffi::OsString, process::ExitCode, sync::Arc};

use clap::{Parser, Subcommand};
use megaburn_launch::{launch_child, tie_to_launcher};
use megaburn_train::{Exit, TrainError};

pub use device::DeviceArg;
pub use hint::with_setting;
pub use train::TrainArgs;

/// Megatron-LM's training system for Burn.
#[derive(Parser)]
#[command(name = "megaburn", version, after_help = Exit::help())]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Pre-train a model: on all GPUs, on threads of this process, or as one rank under a launcher.
    Train(Box<TrainArgs>),
    /// Let a model continue prompts.
    Generate(generate::GenerateArgs),
    /// Turn a Hugging Face model into a checkpoint, or a checkpoint into a Hugging Face model.
    #[command(subcommand)]
    Convert(convert::ConvertCommand),
    /// Compare a layout with what Transformers computed, or two models tensor by tensor.
    Verify(verify::VerifyArgs),
    /// Draw a pipeline schedule, with its bubble and what it keeps in memory.
    Plan(plan::PlanArgs),
    /// Train a byte-level BPE tokenizer and write its `tokenizer.json`.
    Tokenize(tokenize::TokenizeArgs),
    /// Start a program as several ranks on this host, with torchrun's environment names.
    Launch(launch::LaunchArgs),
    /// What `launch` starts each rank through.
    #[command(hide = true, disable_help_flag = true)]
    LaunchChild {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

/// Runs the command that the process was started with. Returns how it should exit.
pub fn main() -> ExitCode {
    run(std::env::args_os())
}

/// Runs a command line, which begins with the program's name: for programs that are several.
pub fn run(command: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = parse(command.into_iter().collect()).unwrap_or_else(|error| error.exit());
    print::start_logging();
    refuse_large_files_by_error();
    let code = match cli.command {
        Command::Train(args) => args.run(),
        Command::Generate(args) => begin(|| args.run()),
        Command::Convert(command) => done(command.run()),
        Command::Verify(args) => args.run(),
        Command::Plan(args) => args.run(),
        Command::Tokenize(args) => args.run(),
        Command::Launch(args) => args.run(),
        Command::LaunchChild { args } => exit_code(launch_child(args)),
    };
    print::flush();
    code
}

/// A file that outgrows the limit of `ulimit -f` is an error that names it, not a signal that kills.
fn refuse_large_files_by_error() {
    // With a handler, the write fails with EFBIG. Where there can be none it stays as it was.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
}

/// Reads a command line. What is wrong with it is answered with what was probably meant.
fn parse(command: Vec<OsString>) -> Result<Cli, clap::Error> {
    let subcommand = command.get(1).cloned().unwrap_or_default();
    Cli::try_parse_from(command).map_err(|error| match subcommand.to_str() {
        Some("train") => hint::with_setting(error),
        Some("launch") => hint::with_program(error),
        _ => error,
    })
}

/// What a program does that may be one of several ranks.
fn begin(run: impl FnOnce() -> Result<ExitCode, TrainError>) -> ExitCode {
    print::start_logging();
    refuse_large_files_by_error();
    let code = match tie_to_launcher() {
        Ok(()) => run().unwrap_or_else(|error| fail(&error.to_string(), error.exit())),
        Err(error) => fail(&error.to_string(), Exit::Failed),
    };
    print::flush();
    code
}

fn done(result: Result<(), TrainError>) -> ExitCode {
    match result {
        Ok(()) => Exit::Done.into(),
        Err(error) => fail(&error.to_string(), error.exit()),
    }
}

fn fail(error: &str, exit: Exit) -> ExitCode {
    print::error(error);
    exit.into()
}

fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
