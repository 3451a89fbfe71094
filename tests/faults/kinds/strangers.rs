//! Callers that do not belong to the job, and ranks that do not belong together.

use std::{
    fs,
    io::Write,
    net::{TcpListener, TcpStream},
    process::Command,
    thread,
    time::Duration,
};

use super::signals::free_port;
use crate::{
    case::{Case, ENDLESS, ENDS, STEPS, world_size},
    check,
    job::{Job, PATIENCE, megaburn, wait_until},
};

/// Starts ranks under a custom environment, as another launcher would.
fn ranks(
    case: &Case,
    layout: &str,
    port: u16,
    mut change: impl FnMut(usize, &mut Command),
) -> Vec<Job> {
    let world = world_size(layout);
    let rank = |rank: usize| {
        let mut command = megaburn(case.train_args(layout, STEPS, &[]));
        command
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string());
        command.env("WORLD_SIZE", world.to_string());
        command
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string());
        change(rank, &mut command);
        case.start(command)
    };
    (0..world).map(rank).collect()
}

/// The same command, started some seconds later.
fn late(command: &Command, seconds: f64) -> Command {
    let variables = command
        .get_envs()
        .filter_map(|(name, value)| Some((name, value?)));
    let script = format!("sleep {seconds}; exec \"$@\"");
    let mut late = crate::job::plain("sh", ["-c", &script, "sh"]);
    late.arg(crate::job::binary())
        .args(command.get_args())
        .envs(variables);
    late
}

/// Silent callers at the port on which a rank other than 0 waits for the last one.
pub(super) fn silence(case: &Case) -> Result<(), String> {
    let layout = case.layout_of(4);
    let mut jobs = ranks(case, layout, free_port(), |rank, command| {
        if rank == 3 {
            *command = late(command, 1.5);
        }
    });
    let mut ports = Vec::new();
    wait_until("ranks 1 and 2 listen", || {
        ports = jobs[1..3]
            .iter()
            .filter_map(|job| listening_port(job.pid()))
            .collect();
        ports.len() == 2
    })?;
    let mut held = Vec::new();
    for _ in 0..1 + case.below(20) {
        for port in &ports {
            held.extend(TcpStream::connect(("127.0.0.1", *port)));
        }
    }
    for job in &mut jobs {
        job.wait(PATIENCE)?.expect(&[0])?;
    }
    case.recover_as(layout)
}

/// The port that a process listens on.
fn listening_port(pid: i32) -> Option<u16> {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let links = links.filter_map(|link| fs::read_link(link.path()).ok());
    let sockets: Vec<String> = links.map(|link| link.display().to_string()).collect();
    let tables = ["tcp", "tcp6"].map(|table| fs::read_to_string(format!("/proc/net/{table}")));
    let port = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // The state 0A is LISTEN.
        let is_its = fields.get(3) == Some(&"0A")
            && sockets.contains(&format!("socket:[{}]", fields.get(9)?));
        let (_, port) = fields.get(1)?.rsplit_once(':')?;
        is_its.then(|| u16::from_str_radix(port, 16).ok())?
    };
    tables
        .iter()
        .flatten()
        .flat_map(|table| table.lines())
        .find_map(port)
}

/// Garbage and silence at rank 0's port change nothing.
pub(super) fn noise(case: &Case) -> Result<(), String> {
    let layout = case.layout_of(2);
    let port = free_port();
    // Rank 1 arrives late, so at first only strangers call at rank 0's port.
    let mut jobs = ranks(case, layout, port, |rank, command| {
        if rank == 1 {
            *command = late(command, 0.7);
        }
    });
    let mut held = Vec::new();
    let words: [&[u8]; 5] = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"mgbn\xff\xff\xff\xff",
        &[0; 64],
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ];
    for _ in 0..3 + case.below(12) {
        thread::sleep(Duration::from_millis(case.below(60)));
        if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
            let _ = stream.write_all(case.one_of(&words));
            held.push(stream);
        }
    }
    for job in &mut jobs {
        job.wait(PATIENCE)?.expect(&[0])?;
    }
    case.recover_as(layout)
}

/// A second job at the same port ends by itself; the first, which waits for a rank, continues.
pub(super) fn same_port(case: &Case) -> Result<(), String> {
    let layout = case.layout_of(2);
    let port = free_port().to_string();
    let args = case.train_args(layout, STEPS, &[]);
    let binary = crate::job::binary().display().to_string();
    let launch = [
        "launch",
        "--nproc",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        &port,
    ];
    let late = [
        "--",
        "sh",
        "-c",
        "[ $RANK = 1 ] && sleep 1.5; exec \"$@\"",
        "sh",
        &binary,
    ];
    let mut first = case.start(megaburn(
        launch
            .iter()
            .chain(&late)
            .map(|arg| arg.to_string())
            .chain(args),
    ));
    thread::sleep(Duration::from_millis(500));
    let other = format!("run.dir={}", case.path("other").display());
    let args = case.train_args(layout, STEPS, &[&other, "run.seed=7"]);
    let program = ["--", binary.as_str()];
    let second = launch
        .iter()
        .chain(&program)
        .map(|arg| arg.to_string())
        .chain(args);
    let mut second = case.start(megaburn(second));
    let ended = second.wait(PATIENCE)?;
    if ended.code == 0 {
        return Err("the second job at the port ended with 0".to_string());
    }
    first.wait(PATIENCE)?.expect(&[0])?;
    case.recover_as(layout)
}

/// One rank is started with another configuration: all end at once and train nothing.
pub(super) fn other_config(case: &Case) -> Result<(), String> {
    let odd = case.below(world_size(case.layout) as u64) as usize;
    let set = case.one_of(&[
        "optimizer.lr=0.5",
        "run.seed=9",
        "model.ffn=128",
        "train.global_batch=8",
    ]);
    let mut jobs = ranks(case, case.layout, free_port(), |rank, command| {
        if rank == odd {
            command.args(["--set", set]);
        }
    });
    for job in &mut jobs {
        let ended = job.wait(ENDS)?;
        case.took(ended.seconds);
        ended.expect(&[2, 4])?;
    }
    match check::last_step(&case.run()) {
        0 => Ok(()),
        step => Err(format!("{step} steps were trained with two configurations")),
    }
}

/// An impossible rank, world size or port gives a clear error without waiting.
pub(super) fn absurd_environment(case: &Case) -> Result<(), String> {
    let (name, value) = case.one_of(&[
        ("RANK", "7"),
        ("RANK", "-1"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "many"),
        ("MASTER_PORT", "99999"),
        ("MASTER_ADDR", ""),
    ]);
    let mut command = megaburn(case.train_args("dp2", ENDLESS, &[]));
    command
        .env("RANK", "0")
        .env("LOCAL_RANK", "0")
        .env("WORLD_SIZE", "2");
    command
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", free_port().to_string());
    command.env(name, value);
    let ended = case.start(command).wait(Duration::from_secs(10))?;
    case.took(ended.seconds);
    ended.expect(&[2])?.says(&[name])?;
    // A port that another program listens on.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let mut command = megaburn(case.train_args("dp2", ENDLESS, &[]));
    command
        .env("RANK", "0")
        .env("LOCAL_RANK", "0")
        .env("WORLD_SIZE", "2");
    command
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string());
    let ended = case.start(command).wait(Duration::from_secs(20))?;
    ended.expect(&[1, 2, 4])?.says(&[&port.to_string()])?;
    check::no_processes(case.dir(), Duration::from_secs(2))
}
