//! Runs a job on this host.

use crate::{
    agents, command, error::LaunchError, host::Host, job::Job, options::LaunchOptions,
    verdict::Outcome,
};

/// Starts the ranks, passes on their output, and returns when all have ended.
///
/// The first rank that fails ends all others:
///
/// - They get a second to end by themselves, as ranks that lose a peer do.
/// - Then they get SIGTERM, and after [`LaunchOptions::grace`] SIGKILL.
/// - A rank that has not ended [`LaunchOptions::give_up`] after that is abandoned and named.
///
/// [`LaunchOptions::restart`] says whether they are then started again.
///
/// The signals of [`stop_signals`](crate::stop_signals) are forwarded to the ranks, which may save
/// first. SIGTSTP suspends the ranks together with the launcher.
///
/// Call this on a thread that lives until it returns (the main thread), because the ranks are tied
/// to the life of that thread.
///
/// # Errors
/// The options are invalid, the command does not exist, or a rank cannot be started. With several
/// hosts: the launcher that coordinates them refuses this one, or is lost.
///
/// # Collective
/// With several hosts, each runs its own launcher with the same options but for `node_rank`.
pub fn launch(options: &LaunchOptions) -> Result<Outcome, LaunchError> {
    let job = Job::of(options)?;
    command::check(&options.command[0])?;
    let mut host = Host::new(options)?;
    let outcome = if options.has_agents() {
        agents::run(&mut host, &job)
    } else {
        host.run(job)
    };
    host.close();
    outcome
}
