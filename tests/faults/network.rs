//! Hosts that are network namespaces of this machine, connected by a bridge. They need `ip`, `tc`
//! and the rights of root.

use std::{
    process::{self, Command},
    sync::atomic::{AtomicUsize, Ordering},
};

/// Hosts with addresses of their own, which see only each other.
pub(crate) struct Network {
    name: String,
    hosts: usize,
}

impl Network {
    /// Creates the hosts.
    ///
    /// # Errors
    /// This machine or user cannot create network namespaces.
    pub(crate) fn new(hosts: usize) -> Result<Self, String> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("mb-{}-{number}", process::id());
        let network = Self { name, hosts };
        network.create()?;
        Ok(network)
    }

    fn create(&self) -> Result<(), String> {
        let switch = self.switch();
        ip(&format!("netns add {switch}"))?;
        ip(&format!("-n {switch} link add br0 type bridge"))?;
        ip(&format!("-n {switch} link set br0 up"))?;
        for host in 0..self.hosts {
            let name = self.host(host);
            ip(&format!("netns add {name}"))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!(
                "-n {switch} link add port{host} type veth peer name eth0 netns {name}"
            ))?;
            ip(&format!("-n {switch} link set port{host} master br0 up"))?;
            let address = Self::address(host);
            ip(&format!("-n {name} address add {address}/24 dev eth0"))?;
            ip(&format!("-n {name} link set eth0 up"))?;
        }
        // Not every kernel can limit a rate, or lets programs run in a namespace.
        ip(&format!("netns exec {} true", self.host(0)))?;
        self.set_limit(0, Some(200))?;
        self.set_limit(0, None)
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }

    fn host(&self, host: usize) -> String {
        format!("{}-{host}", self.name)
    }

    pub(crate) fn address(host: usize) -> String {
        format!("10.77.0.{}", host + 1)
    }

    /// The same command on a host.
    pub(crate) fn on_host(&self, host: usize, command: &Command) -> Command {
        let mut there = Command::new("ip");
        there.args(["netns", "exec", &self.host(host)]);
        there.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => there.env(name, value),
                None => there.env_remove(name),
            };
        }
        there
    }

    /// Cuts a host off from the others, or connects it again.
    pub(crate) fn set_connected(&self, host: usize, is_connected: bool) -> Result<(), String> {
        let state = if is_connected { "up" } else { "down" };
        let switch = self.switch();
        ip(&format!("-n {switch} link set port{host} {state}"))
    }

    /// Limits what a host sends to a number of kilobits per second, or ends the limit.
    pub(crate) fn set_limit(&self, host: usize, kilobits: Option<u64>) -> Result<(), String> {
        let host = self.host(host);
        match kilobits {
            Some(kilobits) => tc(&format!(
                "-n {host} qdisc add dev eth0 root tbf rate {kilobits}kbit burst 8k latency 500ms"
            )),
            None => tc(&format!("-n {host} qdisc del dev eth0 root")),
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // Some may not have been created.
        for host in 0..self.hosts {
            let _ = ip(&format!("netns del {}", self.host(host)));
        }
        let _ = ip(&format!("netns del {}", self.switch()));
    }
}

fn ip(arguments: &str) -> Result<(), String> {
    run("ip", arguments)
}

fn tc(arguments: &str) -> Result<(), String> {
    run("tc", arguments)
}

fn run(program: &str, arguments: &str) -> Result<(), String> {
    let output = Command::new(program)
        .args(arguments.split(' '))
        .output()
        .map_err(|error| format!("`{program}` cannot be run: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!(
            "`{program} {arguments}`: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}
