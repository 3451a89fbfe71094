//! How ranks find each other, and what happens when they cannot.

mod fixture;

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use burn::tensor::TensorData;
use fixture::{bounded, env};
use megaburn_collective::{
    CollectiveError, ConnectOptions, Group, GroupOptions, JobToken, RankEnv, ReduceOp, connect,
    free_port, report_start_failure,
};
use rstest::rstest;

const LIMIT: Duration = Duration::from_secs(60);

fn join(env: RankEnv, seed: u64, seconds: u64) -> Result<Group, CollectiveError> {
    let group = GroupOptions {
        seed,
        timeout: Duration::from_secs(30),
        ..Default::default()
    };
    let options = ConnectOptions::new(env).with_group(group);
    connect(&options.with_rendezvous_timeout(Duration::from_secs(seconds)))
}

/// Joins as each of `envs`, from threads; sums a value over the ranks that joined.
fn join_all(envs: Vec<RankEnv>, seconds: u64) -> Vec<Result<f32, String>> {
    bounded(LIMIT, move || {
        let rank = |env: RankEnv| {
            let world = join(env, 0, seconds).map_err(|error| error.to_string())?;
            let sum = world.all_reduce(TensorData::from([1f32]), ReduceOp::Sum);
            sum.map(|sum| sum.iter::<f32>().sum())
                .map_err(|error| error.to_string())
        };
        thread::scope(|scope| {
            let ranks: Vec<_> = envs
                .into_iter()
                .map(|env| scope.spawn(move || rank(env)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    })
}

fn envs(size: usize, port: u16) -> Vec<RankEnv> {
    (0..size).map(|rank| env(rank, size, port)).collect()
}

#[rstest]
#[case("localhost")]
#[case("127.0.0.1")]
#[case("::1")]
fn names_and_addresses_of_both_kinds_work(#[case] addr: &str) {
    if addr == "::1" && TcpListener::bind("[::1]:0").is_err() {
        eprintln!("this host has no IPv6: nothing to see");
        return;
    }
    let mut envs = envs(3, free_port().unwrap());
    envs.iter_mut()
        .for_each(|env| env.master_addr = addr.to_string());
    assert_eq!(join_all(envs, 30), [Ok(3.0), Ok(3.0), Ok(3.0)]);
}

#[test]
fn the_own_host_name_works() {
    let Ok(name) = std::fs::read_to_string("/proc/sys/kernel/hostname") else {
        return;
    };
    let name = name.trim().to_string();
    if std::net::ToSocketAddrs::to_socket_addrs(&(name.as_str(), 0)).is_err() {
        eprintln!("this host does not know its own name {name}: nothing to see");
        return;
    }
    let mut envs = envs(3, free_port().unwrap());
    envs.iter_mut()
        .for_each(|env| env.master_addr = name.clone());
    assert_eq!(join_all(envs, 30), [Ok(3.0), Ok(3.0), Ok(3.0)]);
}

#[test]
fn a_world_of_one_needs_no_port() {
    let world = join(env(0, 1, 1), 5, 1).unwrap();
    assert_eq!((world.size(), world.seed()), (1, 5));
}

#[test]
fn rank_0_may_come_last() {
    let port = free_port().unwrap();
    let ends = bounded(LIMIT, move || {
        let first = thread::spawn(move || join_all(vec![env(1, 2, port)], 30));
        thread::sleep(Duration::from_millis(700));
        let last = join_all(vec![env(0, 2, port)], 30);
        [first.join().unwrap(), last].concat()
    });
    assert_eq!(ends, [Ok(2.0), Ok(2.0)]);
}

#[test]
fn a_port_in_use_is_named_with_the_way_out() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let error = join(env(0, 2, address.port()), 0, 5).unwrap_err();
    assert!(
        matches!(error, CollectiveError::AddressInUse { .. }),
        "{error}"
    );
    let text = error.to_string();
    assert!(
        text.contains(&address.to_string()) && text.contains("--master-port"),
        "{text}"
    );
}

#[test]
fn who_is_missing_is_told_to_all_who_came() {
    let port = free_port().unwrap();
    let some = envs(5, port)
        .into_iter()
        .filter(|env| ![2, 4].contains(&env.rank))
        .collect();
    for end in join_all(some, 5) {
        assert!(end.as_ref().unwrap_err().contains("[2, 4]"), "{end:?}");
    }
}

#[test]
fn without_rank_0_the_others_give_up_and_say_where_they_looked() {
    let port = free_port().unwrap();
    let begin = Instant::now();
    let end = join_all(vec![env(1, 2, port)], 1).remove(0).unwrap_err();
    assert!(
        end.contains("rank 0") && end.contains(&format!("127.0.0.1:{port}")),
        "{end}"
    );
    assert!(begin.elapsed() < Duration::from_secs(5));
}

/// The same ranks in a job with a secret token.
fn secret(mut envs: Vec<RankEnv>) -> Vec<RankEnv> {
    envs.iter_mut()
        .for_each(|env| env.job_token = JobToken::secret("s3cret"));
    envs
}

#[test]
fn two_processes_with_one_rank_are_told_so() {
    let port = free_port().unwrap();
    let twice = vec![env(0, 3, port), env(1, 3, port), env(1, 3, port)];
    for (envs, seconds) in [(secret(twice.clone()), 30), (twice, 2)] {
        let begin = Instant::now();
        for end in join_all(envs, seconds) {
            assert!(end.as_ref().unwrap_err().contains("RANK=1"), "{end:?}");
        }
        assert!(
            begin.elapsed() < Duration::from_secs(8),
            "the job's own mistake ends it at once"
        );
    }
}

#[test]
fn another_world_size_is_told_to_both() {
    let port = free_port().unwrap();
    for end in join_all(secret(vec![env(0, 2, port), env(1, 3, port)]), 30) {
        let error = end.unwrap_err();
        assert!(
            error.contains("WORLD_SIZE=3") && error.contains("rank 0 with 2"),
            "{error}"
        );
    }
}

/// Without a secret token, a contradicting caller cannot be attributed to this job.
#[test]
fn a_caller_with_an_absurd_introduction_changes_nothing() {
    let port = free_port().unwrap();
    let ends = bounded(LIMIT, move || {
        let first = thread::spawn(move || join_all(vec![env(0, 2, port)], 30));
        for absurd in [env(1, 99, port), env(7, 99, port)] {
            let refused = join(absurd, 0, 30).unwrap_err().to_string();
            assert!(refused.contains("WORLD_SIZE=99"), "{refused}");
        }
        let last = join_all(vec![env(1, 2, port)], 30);
        [first.join().unwrap(), last].concat()
    });
    assert_eq!(ends, [Ok(2.0), Ok(2.0)]);
}

/// A second job at the same port: its ranks reach rank 0 of the first one.
#[test]
fn ranks_of_another_job_are_refused_and_it_goes_on() {
    let port = free_port().unwrap();
    let ends = bounded(LIMIT, move || {
        let first = thread::spawn(move || join_all(secret(vec![env(0, 2, port)]), 30));
        let other = |token: JobToken| RankEnv {
            job_token: token,
            ..env(1, 2, port)
        };
        for token in [JobToken::secret("another"), JobToken::default()] {
            let refused = join(other(token), 7, 30).unwrap_err().to_string();
            assert!(refused.contains("belongs to another job"), "{refused}");
        }
        let last = join_all(secret(vec![env(1, 2, port)]), 30);
        [first.join().unwrap(), last].concat()
    });
    assert_eq!(ends, [Ok(2.0), Ok(2.0)]);
}

#[test]
fn a_rank_that_cannot_start_ends_the_others_at_once_by_name() {
    const WHY: &str = "cannot read `nowhere.txt`";
    for failing in [0, 2] {
        let port = free_port().unwrap();
        let begin = Instant::now();
        let ends = bounded(LIMIT, move || {
            let (failing, others): (Vec<_>, Vec<_>) = secret(envs(3, port))
                .into_iter()
                .partition(|env| env.rank == failing);
            let tell: Vec<_> = failing
                .into_iter()
                .map(|env| fail_beside(env, WHY))
                .collect();
            let others: Vec<_> = others.into_iter().map(join_beside).collect();
            tell.into_iter().for_each(|end| end.join().unwrap());
            others
                .into_iter()
                .map(|end| end.join().unwrap().unwrap_err())
                .collect::<Vec<_>>()
        });
        for end in ends {
            let CollectiveError::CannotStart { rank, why, code } = end else {
                panic!("{end}")
            };
            assert_eq!((rank, why.as_str(), code), (failing, WHY, 2));
        }
        assert!(
            begin.elapsed() < Duration::from_secs(10),
            "{:?}",
            begin.elapsed()
        );
    }
}

fn join_beside(env: RankEnv) -> thread::JoinHandle<Result<Group, CollectiveError>> {
    thread::spawn(move || join(env, 0, 30))
}

fn fail_beside(env: RankEnv, why: &'static str) -> thread::JoinHandle<()> {
    let options = ConnectOptions::new(env).with_rendezvous_timeout(Duration::from_secs(30));
    thread::spawn(move || report_start_failure(&options, why, 2))
}

#[rstest]
fn a_rank_that_comes_late_hears_too_that_others_cannot_start(#[values(0, 1)] first: usize) {
    let port = free_port().unwrap();
    let begin = Instant::now();
    let ends = bounded(LIMIT, move || {
        let mut envs = secret(envs(first + 3, port));
        let late = envs.pop().unwrap();
        let failing: Vec<_> = envs
            .split_off(first)
            .into_iter()
            .map(|env| fail_beside(env, "no data"))
            .collect();
        let healthy: Vec<_> = envs.into_iter().map(join_beside).collect();
        thread::sleep(Duration::from_millis(1500));
        let mut ends = vec![join(late, 0, 30)];
        ends.extend(healthy.into_iter().map(|end| end.join().unwrap()));
        failing.into_iter().for_each(|end| end.join().unwrap());
        ends
    });
    for end in ends {
        let Err(CollectiveError::CannotStart { why, code: 2, .. }) = end else {
            panic!("{end:?}")
        };
        assert_eq!(why, "no data");
    }
    assert!(
        begin.elapsed() < Duration::from_secs(10),
        "{:?}",
        begin.elapsed()
    );
}

/// Without a secret token, the caller may be a rank of another job.
#[rstest]
fn a_failure_from_elsewhere_ends_the_job_only_if_the_right_rank_does_not_come(
    #[values(true, false)] comes: bool,
) {
    let port = free_port().unwrap();
    let end = bounded(LIMIT, move || {
        let group = GroupOptions {
            timeout: Duration::from_millis(900),
            ..Default::default()
        };
        let options = ConnectOptions::new(env(0, 2, port)).with_group(group);
        let host = thread::spawn(move || connect(&options));
        fail_beside(env(1, 2, port), "no data").join().unwrap();
        let _guest = comes.then(|| join(env(1, 2, port), 0, 30).unwrap());
        host.join().unwrap()
    });
    match (comes, end) {
        (true, Ok(_))
        | (
            false,
            Err(CollectiveError::CannotStart {
                rank: 1, code: 2, ..
            }),
        ) => {}
        (_, end) => panic!("{end:?}"),
    }
}

/// Another host may arrive minutes later, but a missing rank of the same host hangs.
#[test]
fn a_rank_that_does_not_join_the_others_of_its_host_ends_them() {
    let port = free_port().unwrap();
    let host = RankEnv {
        is_local_world_known: true,
        ..env(0, 2, port)
    };
    let group = GroupOptions {
        timeout: Duration::from_millis(400),
        ..Default::default()
    };
    let begin = Instant::now();
    let error = connect(&ConnectOptions::new(host).with_group(group))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("ranks [1] of 2 did not join within 0.4 s"),
        "{error}"
    );
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
}

#[test]
fn another_seed_is_told_to_both() {
    let port = free_port().unwrap();
    let errors = bounded(LIMIT, move || {
        let [zero, one] = secret(envs(2, port)).try_into().unwrap();
        let other = thread::spawn(move || join(one, 8, 30).unwrap_err());
        [join(zero, 7, 30).unwrap_err(), other.join().unwrap()]
    });
    for error in errors {
        assert!(error.to_string().contains("seed 8"), "{error}");
    }
}

#[test]
fn strangers_are_refused_and_disturb_nobody() {
    let port = free_port().unwrap();
    let ends = bounded(LIMIT, move || {
        let first = thread::spawn(move || join_all(vec![env(0, 3, port), env(2, 3, port)], 40));
        let dial = || loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => return stream,
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        };
        let _silent = dial();
        let mut browser = dial();
        browser
            .write_all(b"GET / HTTP/1.1\r\nHost: rank-0\r\n\r\n")
            .unwrap();
        drop(dial());
        let mut lost = env(1, 3, port);
        lost.job_token = JobToken::secret("yesterday's");
        let refused = join(lost, 0, 30).unwrap_err().to_string();
        assert!(
            refused.contains("another job") && !refused.contains("yesterday's"),
            "{refused}"
        );
        let mut answer = Vec::new();
        // Expect the answer and then the end of the connection: the caller is not kept waiting.
        let _ = browser.read_to_end(&mut answer);
        let last = join_all(vec![env(1, 3, port)], 30);
        [first.join().unwrap(), last].concat()
    });
    assert_eq!(ends, [Ok(3.0), Ok(3.0), Ok(3.0)]);
}

#[test]
fn what_listens_at_the_port_but_is_no_rank_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream
                .unwrap()
                .write_all(b"SSH-2.0-OpenSSH_9.6\r\nand some more words\r\n");
        }
    });
    let end = join_all(vec![env(1, 2, port)], 20).remove(0).unwrap_err();
    assert!(end.contains("not rank 0"), "{end}");
}
