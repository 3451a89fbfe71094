//! A signal ends whole processes, so each case runs in a child: this very test once more, told by
//! the environment which signals to send itself.

use std::{
    env,
    process::{Command, Stdio},
    thread::sleep,
    time::Duration,
};

use megaburn_train::signal::StopSignal;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    low_level::raise,
};

const SIGNALS: &str = "MEGABURN_TEST_SIGNALS";
// What the child ends with when it outlives its signals: none of the codes under test.
const OUTLIVED: i32 = 77;

#[test]
fn the_first_signal_is_heard_and_the_second_exits_with_its_code() {
    if let Ok(signals) = env::var(SIGNALS) {
        child(&signals);
    }
    assert_eq!(exit_code_after("INT"), Some(OUTLIVED));
    assert_eq!(exit_code_after("TERM"), Some(OUTLIVED));
    assert_eq!(exit_code_after("INT INT TERM"), Some(OUTLIVED));
    assert_eq!(exit_code_after("INT later INT"), Some(130));
    assert_eq!(exit_code_after("INT later TERM"), Some(143));
}

fn exit_code_after(signals: &str) -> Option<i32> {
    Command::new(env::current_exe().unwrap())
        .env(SIGNALS, signals)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap()
        .code()
}

fn child(signals: &str) -> ! {
    let stop = StopSignal::install().unwrap();
    assert_eq!(stop.requested(), None);
    for name in signals.split(' ') {
        if name == "later" {
            sleep(Duration::from_millis(1200));
            continue;
        }
        raise(if name == "INT" { SIGINT } else { SIGTERM }).unwrap();
        assert_eq!(stop.clone().requested(), Some(format!("SIG{name}").as_str()));
    }
    // The thread that ends the process has its moment.
    sleep(Duration::from_millis(500));
    std::process::exit(OUTLIVED)
}
