//! The `megaburn` command.

use std::{ffi::OsString, process::ExitCode};

use clap::{Args, Parser, Subcommand};
use megaburn::{
    cli::TrainArgs,
    collective::launcher::{LaunchOptions, launch, launch_child},
    train::Exit,
};

/// Megatron-LM's training system for Burn.
#[derive(Parser)]
#[command(name = "megaburn", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Pre-train a Llama: on threads of this process, or as one rank under a launcher.
    Train(TrainArgs),
    /// Start a program as several ranks on this host, with torchrun's environment names.
    Launch(LaunchArgs),
    /// What `launch` starts each rank through.
    #[command(hide = true, disable_help_flag = true)]
    LaunchChild {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

#[derive(Args)]
struct LaunchArgs {
    /// Ranks on this host.
    #[arg(long, value_name = "N")]
    nproc: usize,
    /// Hosts, each with a launcher of its own.
    #[arg(long, value_name = "M", default_value_t = 1)]
    nnodes: usize,
    /// This host's number, from 0.
    #[arg(long, value_name = "R", default_value_t = 0)]
    node_rank: usize,
    /// Rank 0's host, needed with several hosts.
    #[arg(long, value_name = "A")]
    master_addr: Option<String>,
    /// Rank 0's port, needed with several hosts.
    #[arg(long, value_name = "P")]
    master_port: Option<u16>,
    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl LaunchArgs {
    fn run(self) -> ExitCode {
        let options = LaunchOptions::new(self.nproc, self.command)
            .with_nodes(self.nnodes, self.node_rank)
            .with_master(self.master_addr, self.master_port);
        match launch(&options) {
            Ok(outcome) => exit_code(outcome.exit_code()),
            Err(error) => {
                eprintln!("error: {error}");
                Exit::BadInput.into()
            }
        }
    }
}

fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Train(args) => args.run(),
        Command::Launch(args) => args.run(),
        Command::LaunchChild { args } => exit_code(launch_child(args)),
    }
}
