//! The threads that a rank computes with.

use std::{env, io, thread};

/// Autodiff recurses through deep graphs on the rank's stack.
const STACK_BYTES: usize = 32 << 20;

/// Runs a rank in its own rayon pool, which Burn's CPU backend then uses. The pool has an equal
/// share of the host's cores for each of `ranks` ranks (`RAYON_NUM_THREADS` overrides this). In the
/// global pool the ranks of a process would queue behind each other.
///
/// # Errors
/// The system cannot start the pool's threads.
pub fn in_own_pool<T: Send>(ranks: usize, rank: impl FnOnce() -> T + Send) -> io::Result<T> {
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get());
    let threads = match env::var_os("RAYON_NUM_THREADS") {
        Some(_) => 0, // Rayon reads the variable itself.
        None => (cores / ranks.max(1)).max(1),
    };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .stack_size(STACK_BYTES);
    let pool = pool.build().map_err(io::Error::other)?;
    Ok(pool.install(rank))
}
