//! Runs a program on all ranks of a layout.

use std::{env, error::Error, process::ExitCode};

use megaburn_checkpoint::CheckpointError;
use megaburn_collective::{
    CollectiveError, ConnectOptions, Group, GroupOptions, ProcessGroups, RankEnv, RankFailure,
    connect, region::FAILED_REGION, run_threads,
};
use megaburn_launch::{in_own_pool, tie_to_launcher};
use megaburn_mesh::Layout;

use crate::error::LearnerError;

/// An error of a program.
type AnyError = Box<dyn Error + Send + Sync>;

/// Runs `program` on every rank, prints the error that ended it, and returns the exit code for `main`.
///
/// The argument `--layout` selects the layout; the program reads its other arguments itself. The
/// ranks are threads of this process. Under a launcher that sets torchrun's environment variables
/// (`megaburn launch --nproc 4 -- my_program --layout tp2-dp2`), this process is one rank; without
/// `--layout`, all ranks are data-parallel then.
///
/// ```no_run
/// use std::process::ExitCode;
///
/// use burn::prelude::Device;
/// use megaburn_collective::ProcessGroups;
/// use megaburn_learner::{LearnerError, run_ranks};
///
/// fn train(groups: &ProcessGroups, device: &Device) -> Result<(), LearnerError> {
///     // The program, with `groups.tp` for its parallel layers.
///     # Ok(())
/// }
///
/// fn main() -> ExitCode {
///     run_ranks(|groups| train(groups, &Device::flex().autodiff()))
/// }
/// ```
pub fn run_ranks<E: Into<AnyError>>(
    program: impl Fn(&ProcessGroups) -> Result<(), E> + Sync,
) -> ExitCode {
    let program = |groups: &ProcessGroups| program(groups).map_err(Into::into);
    match run(program) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let is_rank = env::var_os("RANK").filter(|rank| rank != "0");
            let rank = is_rank.map(|rank| format!(" on rank {}", rank.to_string_lossy()));
            tracing::error!("{error}");
            print_error(&format!("error{}: {error}", rank.unwrap_or_default()));
            ExitCode::FAILURE
        }
    }
}

#[expect(
    clippy::print_stderr,
    reason = "a program without a logger shows its error, too"
)]
fn print_error(text: &str) {
    eprintln!("{text}");
}

fn run(program: impl Fn(&ProcessGroups) -> Result<(), AnyError> + Sync) -> Result<(), AnyError> {
    let chosen = layout_argument(env::args())?;
    match RankEnv::from_env()? {
        Some(rank_env) => {
            tie_to_launcher()?;
            let local = rank_env.local_world_size;
            let world_size = rank_env.world_size;
            let layout = chosen.unwrap_or_else(|| format!("dp{world_size}"));
            let layout = parsed(&layout, Some(world_size))?;
            let world = connect(&ConnectOptions::new(rank_env))?;
            let result = in_own_pool(local, || on_rank(&world, layout, &program))?;
            if let Err(error) = &result
                && world.failure().is_none()
            {
                world.abort(&error.to_string());
            }
            result
        }
        None => {
            let layout = parsed(chosen.as_deref().unwrap_or("tp1"), None)?;
            let ranks = layout.world_size();
            let results = run_threads(ranks, GroupOptions::default(), |world| {
                in_own_pool(ranks, || on_rank(&world, layout, &program))?
            });
            first_error(results)
        }
    }
}

fn on_rank(
    world: &Group,
    layout: Layout,
    program: &(impl Fn(&ProcessGroups) -> Result<(), AnyError> + Sync),
) -> Result<(), AnyError> {
    let groups = ProcessGroups::new(world, layout)?;
    program(&groups)
}

/// The value of `--layout`, if it is among the arguments.
fn layout_argument(
    arguments: impl Iterator<Item = String>,
) -> Result<Option<String>, LearnerError> {
    let mut arguments = arguments.skip(1);
    while let Some(argument) = arguments.next() {
        if let Some(value) = argument.strip_prefix("--layout=") {
            return Ok(Some(value.to_owned()));
        }
        if argument == "--layout" {
            let value = arguments.next();
            let missing = || LearnerError::Layout("`--layout` has no value".to_owned());
            return value.map(Some).ok_or_else(missing);
        }
    }
    Ok(None)
}

fn parsed(text: &str, world: Option<usize>) -> Result<Layout, LearnerError> {
    Layout::parse(text, world).map_err(|error| LearnerError::Layout(error.to_string()))
}

/// The error that caused the others: one of a rank itself before one about a failed collective, and
/// that before one that a rank was notified of.
fn first_error(results: Vec<Result<(), RankFailure<AnyError>>>) -> Result<(), AnyError> {
    let mut errors: Vec<(Blame, AnyError)> = Vec::new();
    for (rank, result) in results.into_iter().enumerate() {
        errors.push(match result {
            Ok(()) => continue,
            Err(RankFailure::Failed(error)) => (blame(&*error), error),
            Err(failure) => {
                let why = failure.to_string();
                // A layer cannot return the error of its collective.
                let blame = match why.contains(FAILED_REGION) {
                    true => Blame::Collective,
                    false => Blame::Own,
                };
                (blame, LearnerError::Rank { rank, why }.into())
            }
        });
    }
    let first = errors.into_iter().min_by_key(|(blame, _)| *blame);
    first.map_or(Ok(()), |(_, error)| Err(error))
}

/// Orders errors by how likely they caused the errors of other ranks; the likeliest comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Blame {
    Own,
    Collective,
    Echo,
}

fn blame(error: &(dyn Error + Send + Sync + 'static)) -> Blame {
    let collective = match error.downcast_ref::<LearnerError>() {
        Some(LearnerError::Checkpoint(CheckpointError::Peer { .. })) => return Blame::Echo,
        Some(error) => error.collective(),
        None => error.downcast_ref::<CollectiveError>(),
    };
    match collective {
        Some(error) if error.is_echo() => Blame::Echo,
        Some(_) => Blame::Collective,
        None => Blame::Own,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn argument(arguments: &[&str]) -> Result<Option<String>, String> {
        let all = ["program"].iter().chain(arguments);
        let all = all.map(|&argument| argument.to_owned());
        layout_argument(all).map_err(|error| error.to_string())
    }

    #[test]
    fn the_layout_is_found_among_a_programs_arguments() {
        assert_eq!(
            argument(&["--lr", "3", "--layout", "tp2"]),
            Ok(Some("tp2".into()))
        );
        assert_eq!(argument(&["--layout=dp4", "x"]), Ok(Some("dp4".into())));
        assert_eq!(argument(&["tp2"]), Ok(None));
        assert!(argument(&["--layout"]).unwrap_err().contains("no value"));
    }

    #[test]
    fn a_layout_that_is_none_is_refused_with_an_example() {
        let error = parsed("tp2-xx3", None).unwrap_err().to_string();
        assert!(
            error.contains("xx3") && error.contains("tp2-dp2"),
            "{error}"
        );
    }

    #[test]
    fn the_error_of_the_rank_that_failed_first_is_shown() {
        let results = run_threads(2, GroupOptions::default(), |world| {
            if world.rank() == 1 {
                return Err(AnyError::from("the disk is full"));
            }
            world.barrier()?;
            Ok(())
        });
        let error = first_error(results).unwrap_err().to_string();
        assert_eq!(error, "the disk is full");
    }
}
