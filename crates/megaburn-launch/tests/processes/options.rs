//! The options of a launcher that a test starts.

use std::time::Duration;

use megaburn_launch::{LaunchOptions, RestartPolicy};

/// Sets the options that the variables `TEST_*` give.
pub(crate) fn with_variables(mut options: LaunchOptions) -> LaunchOptions {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().unwrap());
    if let Some(port) = number("TEST_PORT") {
        options = options.with_master(None, Some(port as u16));
    }
    if let Some(restarts) = number("TEST_RESTARTS") {
        options = options.with_restart(RestartPolicy::new(restarts));
        let in_place = std::env::var_os("TEST_IN_PLACE").is_some();
        options = options.with_restart_in_place(in_place);
    }
    if let Some(folder) = std::env::var_os("TEST_STACKS") {
        options = options
            .with_hang_stacks(true)
            .with_log_dir(Some(folder.into()));
    }
    if let Some(node) = number("TEST_NODE") {
        let port = number("TEST_AGENT_PORT").map(|port| port as u16);
        let master_port = options.master_port;
        options = options
            .with_master(Some("127.0.0.1".into()), master_port)
            .with_nodes(number("TEST_NODES").unwrap_or(2), node)
            .with_topology(std::env::var("TEST_TOPOLOGY").ok())
            .with_spares(number("TEST_SPARES").unwrap_or(0))
            .with_agent_port(port)
            .with_host_timeout(Duration::from_secs(8));
    }
    options
}
