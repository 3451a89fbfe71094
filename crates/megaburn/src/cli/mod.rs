//! The `megaburn` command, and the flags of a training run, which applications can reuse.

mod burn_sources;
mod checkpoint;
mod completions;
mod config;
mod convert;
mod data;
mod device;
mod doctor;
mod eval;
mod generate;
mod hang;
mod hint;
mod info;
mod interrupt;
mod launch;
mod man;
mod plan;
mod print;
mod profile;
mod search;
mod sweep;
mod task;
mod tokenize;
mod train;
mod verify;
mod watch;

use std::{ffi::OsString, fmt, process::ExitCode, sync::Arc};

use clap::{CommandFactory, Parser, Subcommand};
use megaburn_launch::{launch_child, tie_to_launcher};
use megaburn_models::{Family, families::ModelFamily};
use megaburn_train::{Exit, TrainError};

pub use device::DeviceArg;
pub use hint::with_setting;
pub use task::{train, train_command};
pub use train::TrainArgs;

/// The `megaburn` command, in a program that may add model families of its own:
///
/// ```no_run
/// use std::process::ExitCode;
///
/// use megaburn::cli::Cli;
///
/// fn main() -> ExitCode {
///     Cli::new().run()
/// }
/// ```
///
/// `docs/families.md` shows a program with a family.
#[derive(Default)]
pub struct Cli {
    families: Vec<&'static dyn ModelFamily>,
}

impl Cli {
    /// The command with the built-in families.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a model family, which every command then knows by its name.
    #[must_use]
    pub fn with_family(mut self, family: &'static dyn ModelFamily) -> Self {
        self.families.push(family);
        self
    }

    /// Runs the command of this process's command line and returns the exit code. A family that
    /// [cannot be registered](Family::register) is an error, like a bad configuration.
    pub fn run(self) -> ExitCode {
        for family in self.families {
            if let Err(error) = Family::register(family) {
                return fail(&error.to_string(), Exit::BadInput);
            }
        }
        run(std::env::args_os())
    }
}

impl fmt::Debug for Cli {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.families.iter().map(|family| family.model_type());
        f.debug_list().entries(names).finish()
    }
}

/// Megatron-LM's training system for Burn.
#[derive(Parser)]
#[command(name = "megaburn", version, after_help = Exit::help())]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Pre-train a model: on all GPUs, on threads of this process, or as one rank under a launcher.
    Train(Box<TrainArgs>),
    /// Compute the loss and the perplexity of a model on named data sets, under any layout.
    Eval(eval::EvalArgs),
    /// Continue prompts with a model.
    Generate(generate::GenerateArgs),
    /// Convert a model of Hugging Face or torchtitan to a checkpoint, a checkpoint to a Hugging Face
    /// model, or a dense model to experts.
    #[command(subcommand)]
    Convert(convert::ConvertCommand),
    /// Look into checkpoints: list, show, verify, compare, prune and average them; move runs from
    /// Megatron-LM and back.
    #[command(subcommand)]
    Checkpoint(checkpoint::CheckpointCommand),
    /// Describe the keys of a configuration, as a page or as a JSON schema for editors.
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Train the runs of a file, a grid or a list of settings, and compare them: a table, a picture, a
    /// scaling law. A sweep that was cut off continues.
    Sweep(sweep::SweepArgs),
    /// Compare layouts with reference results of Transformers, or two models tensor by tensor.
    Verify(verify::VerifyArgs),
    /// Predict the memory, traffic, time and cost of a run before it starts; or draw a pipeline
    /// schedule.
    Plan(Box<plan::PlanArgs>),
    /// Examine the hosts and GPUs of a job before it trains: versions, clocks, errors, rates,
    /// bandwidths, the shared folder, limits. Alone or under a launcher.
    Doctor(doctor::DoctorArgs),
    /// Find the fastest layouts and settings of a configuration on a number of GPUs, by prediction and
    /// then, if asked for, by training a few steps.
    Search(Box<search::SearchArgs>),
    /// Say what a run, a checkpoint or a model is: sizes, layout, last step and loss.
    Info(info::InfoArgs),
    /// Say where the time of a profiled step went, from the trace that `train --profile` wrote.
    Profile(profile::ProfileArgs),
    /// Compare what the ranks of a run did when it hung: the first collective in which they differ, and
    /// where the ranks are that the others wait for.
    Hang(hang::HangArgs),
    /// Serve a page that shows runs while they train: curves, comparison, events, configurations.
    Watch(watch::WatchArgs),
    /// Encode text into data sets in Megatron-LM's format; inspect, merge and split them.
    #[command(subcommand)]
    Data(data::DataCommand),
    /// Train a byte-level BPE tokenizer and write its `tokenizer.json`.
    Tokenize(tokenize::TokenizeArgs),
    /// Start a program as several ranks on this host, with torchrun's environment variables.
    Launch(launch::LaunchArgs),
    /// Print a script that completes the commands, flags and choices of this program in a shell.
    Completions(completions::CompletionsArgs),
    /// Write a manual page of each command into a folder.
    Man(man::ManArgs),
    /// The program through which `launch` starts each rank.
    #[command(hide = true, disable_help_flag = true)]
    LaunchChild {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

/// Runs the command of this process's command line and returns the exit code.
pub fn main() -> ExitCode {
    Cli::new().run()
}

/// The definition of the `megaburn` command, for programs that check or describe command lines.
/// [`run`] runs one.
pub fn command() -> clap::Command {
    CommandLine::command()
}

/// Runs a command line that starts with the program's name; for executables that contain several
/// programs.
pub fn run(command: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = parse(command.into_iter().collect()).unwrap_or_else(|error| error.exit());
    print::start_logging();
    refuse_large_files_by_error();
    let code = match cli.command {
        Command::Train(args) => args.run(),
        Command::Eval(args) => begin(|| args.run()),
        Command::Generate(args) => begin(|| args.run()),
        Command::Convert(command) => done(command.run()),
        Command::Checkpoint(command) => command.run(),
        Command::Config(command) => done(command.run()),
        Command::Data(command) => done(command.run()),
        Command::Verify(args) => args.run(),
        Command::Doctor(args) => begin(|| args.run()),
        Command::Info(args) => done(args.run()),
        Command::Plan(args) => args.run(),
        Command::Search(args) => begin(|| args.run()),
        Command::Profile(args) => done(args.run()),
        Command::Hang(args) => done(args.run()),
        Command::Watch(args) => args.run(),
        Command::Sweep(args) => begin(|| args.run()),
        Command::Tokenize(args) => args.run(),
        Command::Launch(args) => args.run(),
        Command::Completions(args) => done(args.run(self::command())),
        Command::Man(args) => done(args.run(self::command())),
        Command::LaunchChild { args } => exit_code(launch_child(args)),
    };
    print::flush();
    code
}

/// Makes writes beyond the limit of `ulimit -f` fail with an error that names the file, instead of
/// a fatal signal.
fn refuse_large_files_by_error() {
    // With a handler for SIGXFSZ, the write fails with EFBIG. If the handler cannot be registered,
    // the default stays.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
}

/// Parses a command line. Errors get a hint about what was probably meant.
fn parse(command: Vec<OsString>) -> Result<CommandLine, clap::Error> {
    let subcommand = command.get(1).cloned().unwrap_or_default();
    CommandLine::try_parse_from(command).map_err(|error| match subcommand.to_str() {
        Some("train") => hint::with_setting(error),
        Some("launch") => hint::with_program(error),
        _ => error,
    })
}

/// Runs a command that may be one of several ranks.
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
