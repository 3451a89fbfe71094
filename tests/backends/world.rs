//! Ranks over threads and over TCP, and comparisons of what they computed.

use std::{
    collections::BTreeMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
    time::Duration,
};

use megaburn::collective::{
    CollectiveError, ConnectOptions, Group, GroupOptions, JobToken, RankEnv, connect, free_port,
    run_threads,
};
use megaburn_test_support::gather::relative_distance;

/// Values by name.
pub(crate) type Values = BTreeMap<String, Vec<f32>>;

/// How ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    Threads,
    Tcp,
}

/// Runs `body` on the ranks of a world, all in this process, and returns the results in rank order, or
/// the failure of the first rank that failed.
pub(crate) fn on_ranks<T: Send, E: fmt::Display + From<CollectiveError> + Send>(
    over: Over,
    size: usize,
    seed: u64,
    body: impl Fn(Group) -> Result<T, E> + Sync,
) -> Result<Vec<T>, String> {
    let options = GroupOptions {
        seed,
        timeout: Duration::from_secs(300),
        ..GroupOptions::default()
    };
    match over {
        Over::Threads => {
            let ranks = run_threads(size, options, body).into_iter();
            ranks
                .map(|rank| rank.map_err(|failure| failure.to_string()))
                .collect()
        }
        Over::Tcp => over_tcp(size, options, &body),
    }
}

fn over_tcp<T: Send, E: fmt::Display + From<CollectiveError> + Send>(
    size: usize,
    options: GroupOptions,
    body: &(impl Fn(Group) -> Result<T, E> + Sync),
) -> Result<Vec<T>, String> {
    let port = free_port().map_err(|error| error.to_string())?;
    let run = |rank| {
        let options = ConnectOptions::new(env(rank, size, port)).with_group(options);
        let result = connect(&options).map_err(E::from).and_then(body);
        result.map_err(|error| error.to_string())
    };
    thread::scope(|scope| {
        let start = |rank| {
            // Autodiff walks deep graphs on the stack.
            let thread = thread::Builder::new().stack_size(32 << 20);
            let run = &run;
            thread.spawn_scoped(scope, move || run(rank)).unwrap()
        };
        let ranks: Vec<_> = (0..size).map(start).collect();
        let join = |rank: thread::ScopedJoinHandle<'_, _>| {
            let joined = rank.join().map_err(|_| String::from("a rank panicked"));
            joined.and_then(|result| result)
        };
        ranks.into_iter().map(join).collect()
    })
}

fn env(rank: usize, world_size: usize, master_port: u16) -> RankEnv {
    RankEnv {
        rank,
        world_size,
        local_rank: rank,
        local_world_size: world_size,
        is_local_world_known: true,
        ranks_per_gpu: 1,
        master_addr: "127.0.0.1".into(),
        master_port,
        job_token: JobToken::default(),
    }
}

/// The largest relative distance of a value from what is expected, in the Euclidean norm.
///
/// # Errors
/// Other names or lengths, or a distance of more than `tolerance`.
pub(crate) fn compare(found: &Values, expected: &Values, tolerance: f64) -> Result<f64, String> {
    if !found.keys().eq(expected.keys()) {
        return Err(format!(
            "found {:?} instead of {:?}",
            found.keys(),
            expected.keys()
        ));
    }
    let mut largest: f64 = 0.0;
    for (name, values) in found {
        let of = &expected[name];
        if values.len() != of.len() {
            return Err(format!("{name}: {} values of {}", values.len(), of.len()));
        }
        let distance = relative_distance(values, of);
        if distance.is_nan() || distance > tolerance {
            return Err(format!("{name} is {distance:.1e} from Flex"));
        }
        largest = largest.max(distance);
    }
    Ok(largest)
}

/// The result of `body`, or the message of its panic.
pub(crate) fn without_panic<T>(body: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(text.unwrap_or_else(|| "a panic without a message".into()))
    })
}
