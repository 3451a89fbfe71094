//! The behavior of the ranks in each mode.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use burn::tensor::TensorData;
use megaburn_collective::{
    CollectiveError, ConnectOptions, Group, GroupOptions, RankEnv, ReduceOp, connect,
};
use megaburn_launch::{EXIT_PEER_FAILED, Launched, RestartInPlace, WaitReason, tie_to_launcher};
use nix::sys::signal::{Signal, raise};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};

/// The timeout of a collective.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(4);

/// Runs the given mode and returns the exit code.
pub(crate) fn run(mode: &[String]) -> i32 {
    tie_to_launcher().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2] {
        if ["patient", "slow", "stubborn", "barriers"].contains(&mode[0].as_str()) {
            signal_hook::flag::register(signal, stop.clone()).unwrap();
        }
    }
    let env = RankEnv::from_env()
        .unwrap()
        .expect("a launcher started this");
    let group = GroupOptions {
        seed: 3,
        timeout: TIMEOUT,
        ..Default::default()
    };
    if mode[0] == "in-place" {
        return in_place(env, group);
    }
    let world = match connect(&ConnectOptions::new(env).with_group(group)) {
        Ok(world) => world,
        Err(error) => {
            eprintln!("{error}");
            return if matches!(error, CollectiveError::AddressInUse { .. }) {
                2
            } else {
                4
            };
        }
    };
    println!("pid {}", std::process::id());
    match mode[0].as_str() {
        "sum" => match sum(&world, 1) {
            Ok(sum) => println!("sum {sum}"),
            Err(error) => panic!("{error}"),
        },
        // Ends only in another attempt.
        "again" if std::env::var("TORCHELASTIC_RESTART_COUNT").unwrap() != "0" => {
            // Longer than a launcher waits for its ranks before it ends them.
            thread::sleep(Duration::from_millis(2500));
            let cause = std::env::var("MEGABURN_RESTART_CAUSE").unwrap_or_default();
            println!("cause {cause}");
            println!("sum {}", sum(&world, 1).unwrap());
        }
        // Node 1 fails, also if it runs the ranks of another node.
        "node" if std::env::var("TEST_NODE").unwrap() == "1" => {
            eprintln!("its disk is full");
            return 1;
        }
        "node" if std::env::var("TORCHELASTIC_RESTART_COUNT").unwrap() == "2" => {
            println!("sum {}", sum(&world, 1).unwrap());
        }
        "fail" if world.rank() == 1 => {
            eprintln!("its disk is full");
            return mode[1].parse().unwrap();
        }
        "loop" | "fail" | "again" | "node" => {
            let error = loop {
                if let Err(error) = sum(&world, 300_000) {
                    break error;
                }
            };
            eprintln!("{error}");
            return EXIT_PEER_FAILED;
        }
        // Rank 2 ends the others when it is asked to; they exchange nothing but barriers.
        "barriers" if world.rank() == 2 && mode.len() > 1 => {
            while !stop.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(5));
            }
            world.abort("its disk is full");
            // The others' errors are the first that the launcher sees.
            thread::sleep(Duration::from_millis(1500));
            return 1;
        }
        "barriers" => {
            let error = loop {
                if let Err(error) = world.barrier() {
                    break error;
                }
            };
            eprintln!("{error}");
            return EXIT_PEER_FAILED;
        }
        "patient" | "slow" => {
            while !stop.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(5));
            }
            if mode[0] == "slow" {
                thread::sleep(Duration::from_millis(3500));
            }
            println!("saved");
        }
        "stubborn" => loop {
            thread::sleep(Duration::from_secs(1));
        },
        other => panic!("no mode {other}"),
    }
    0
}

/// Rank 1 is killed twice. The others say that they made no progress in between.
fn in_place(mut env: RankEnv, group: GroupOptions) -> i32 {
    let mut launcher = RestartInPlace::enroll().expect("the launcher restarts in place");
    loop {
        let attempt = Launched::from_env().expect("a launcher").attempt;
        println!("attempt {attempt} is process {}", std::process::id());
        let world = connect(&ConnectOptions::new(env.clone()).with_group(group)).unwrap();
        if attempt == 2 {
            println!("sum {}", sum(&world, 1).unwrap());
            return 0;
        }
        let error = loop {
            match sum(&world, 1) {
                Ok(_) if world.rank() == 1 => raise(Signal::SIGKILL).unwrap(),
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        drop(world);
        let reason = WaitReason::LostPeer {
            after_step: 5,
            hangs: false,
        };
        match launcher.wait(&env, reason) {
            Some(next) => env = next,
            None => {
                eprintln!("{error}");
                return EXIT_PEER_FAILED;
            }
        }
    }
}

/// All-reduces `rank + 1` over all ranks, checks that all elements are equal, and returns their
/// value.
fn sum(world: &Group, count: usize) -> Result<f32, CollectiveError> {
    let mine = TensorData::new(vec![world.rank() as f32 + 1.0; count], [count]);
    let sum = world.all_reduce(mine, ReduceOp::Sum)?;
    let first = sum.iter::<f32>().next().expect("it is not empty");
    assert!(sum.iter::<f32>().all(|value| value == first));
    Ok(first)
}
