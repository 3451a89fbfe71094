use std::{
    any::Any,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
};

use crate::{
    group::Group,
    options::GroupOptions,
    rank_context::{FAILURE_GRACE, RankContext},
    threads::ThreadTransport,
    transport::Transport,
};

/// Stack of a rank's thread: autodiff walks deep graphs on it.
const STACK_BYTES: usize = 32 << 20;

/// How one rank of [`run_threads`] failed.
#[derive(Debug, PartialEq, Eq)]
pub enum RankFailure<E> {
    /// Its function returned this error.
    Failed(E),
    /// It panicked with this message.
    Panicked(String),
    /// The system could not create its thread.
    NotStarted(String),
}

impl<E: fmt::Display> fmt::Display for RankFailure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => write!(f, "{error}"),
            Self::Panicked(message) => write!(f, "panicked: {message}"),
            Self::NotStarted(why) => write!(f, "its thread could not be started: {why}"),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> std::error::Error for RankFailure<E> {}

/// Runs `body` on `world_size` ranks, each a thread of this process with its world group, and
/// returns their results in rank order.
///
/// When a rank returns, fails or panics while others wait for it, their waits end with an error.
///
/// Set `RAYON_NUM_THREADS` (or build rayon's pool) to `cores / world_size` first: Burn's CPU
/// backend shares one pool among all ranks.
///
/// ```
/// use burn::tensor::TensorData;
/// use megaburn_collective::{CollectiveError, GroupOptions, ReduceOp, run_threads};
///
/// let sums = run_threads(4, GroupOptions::default(), |world| {
///     let mine = TensorData::from([world.rank() as f32, 1.0]);
///     Ok::<_, CollectiveError>(world.all_reduce(mine, ReduceOp::Sum)?)
/// });
/// assert!(sums.into_iter().all(|sum| sum.unwrap() == TensorData::from([6.0f32, 4.0])));
/// ```
pub fn run_threads<T, E, F>(
    world_size: usize,
    options: GroupOptions,
    body: F,
) -> Vec<Result<T, RankFailure<E>>>
where
    T: Send,
    E: fmt::Display + Send,
    F: Fn(Group) -> Result<T, E> + Sync,
{
    let body = &body;
    thread::scope(|scope| {
        let ranks: Vec<_> = ThreadTransport::world(world_size, options)
            .into_iter()
            .map(|transport| {
                let transport = Arc::new(transport);
                let name = format!("rank-{}", transport.rank());
                let builder = thread::Builder::new().name(name).stack_size(STACK_BYTES);
                let of_rank = transport.clone();
                let run = move || run_rank(of_rank, options, body);
                builder.spawn_scoped(scope, run).map_err(|error| {
                    let failure = RankFailure::<E>::NotStarted(error.to_string());
                    transport.die(&failure.to_string());
                    failure
                })
            })
            .collect();
        let join = |rank: Result<thread::ScopedJoinHandle<'_, _>, _>| {
            rank.and_then(|rank| rank.join().expect("the rank's thread catches panics"))
        };
        ranks.into_iter().map(join).collect()
    })
}

fn run_rank<T, E: fmt::Display>(
    transport: Arc<ThreadTransport>,
    options: GroupOptions,
    body: impl Fn(Group) -> Result<T, E>,
) -> Result<T, RankFailure<E>> {
    let link = Arc::new(RankContext::new(transport.clone()));
    let world = Group::world(link, options);
    let result = match catch_unwind(AssertUnwindSafe(|| body(world))) {
        Ok(result) => result.map_err(RankFailure::Failed),
        Err(panic) => Err(RankFailure::Panicked(panic_message(panic.as_ref()))),
    };
    match &result {
        Ok(_) => transport.leave("it finished and left"),
        Err(failure) => {
            thread::sleep(FAILURE_GRACE);
            transport.die(&failure.to_string());
        }
    }
    result
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a value that is not a string".into())
}
