//! A signal ends a whole process, so each case runs in a child process: this test run again, with
//! an environment variable that lists the signals to send to itself.

use std::{
    env,
    process::{Command, Stdio},
    thread::sleep,
    time::Duration,
};

use megaburn_train::signal::StopSignal;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2},
    low_level::raise,
};

const SIGNALS: &str = "MEGABURN_TEST_SIGNALS";
// The exit code of a child that survives its signals: none of the codes under test.
const OUTLIVED: i32 = 77;

#[test]
fn the_first_signal_is_heard_and_a_later_one_exits_with_its_code() {
    if let Ok(signals) = env::var(SIGNALS) {
        child(&signals);
    }
    let cases = [
        ("INT", OUTLIVED),
        ("TERM", OUTLIVED),
        ("HUP", OUTLIVED),
        ("USR1", OUTLIVED),
        ("USR2", OUTLIVED),
        ("INT INT TERM", OUTLIVED),
        ("USR1 TERM INT", OUTLIVED),
        ("INT later INT", 130),
        ("USR1 later TERM", 143),
        ("launched USR1 soon TERM", 143),
        ("starting TERM", 143),
        ("starting HUP", 129),
    ];
    let children: Vec<_> = cases.iter().map(|(signals, _)| start(signals)).collect();
    for ((signals, code), mut child) in cases.into_iter().zip(children) {
        assert_eq!(child.wait().unwrap().code(), Some(code), "{signals}");
    }
}

fn start(signals: &str) -> std::process::Child {
    // Under `nohup` a program ignores SIGHUP, as it should, but this test sends it.
    let mut command = Command::new("env");
    command
        .arg("--default-signal=HUP")
        .arg(env::current_exe().unwrap());
    if signals.starts_with("launched") {
        command.env("MEGABURN_LAUNCHER", "1");
    }
    command
        .env(SIGNALS, signals)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn child(signals: &str) -> ! {
    let stop = StopSignal::install().unwrap();
    if !signals.starts_with("starting") {
        stop.begin_training();
        assert_eq!(stop.requested(), None);
    }
    let mut first = None;
    for name in signals.split(' ') {
        let signal = match name {
            "starting" | "launched" => continue,
            "soon" => {
                sleep(Duration::from_millis(700));
                continue;
            }
            "later" => {
                sleep(Duration::from_millis(1200));
                continue;
            }
            "INT" => SIGINT,
            "TERM" => SIGTERM,
            "HUP" => SIGHUP,
            "USR1" => SIGUSR1,
            "USR2" => SIGUSR2,
            other => panic!("no signal {other}"),
        };
        raise(signal).unwrap();
        // Give the listening thread time to record the first signal.
        sleep(Duration::from_millis(50));
        let first = *first.get_or_insert(name);
        // Calling `requested` also begins training.
        if !signals.starts_with("starting") {
            assert_eq!(
                stop.clone().requested(),
                Some(format!("SIG{first}").as_str())
            );
        }
    }
    // Give the thread that ends the process time to do so.
    sleep(Duration::from_millis(500));
    std::process::exit(OUTLIVED)
}
