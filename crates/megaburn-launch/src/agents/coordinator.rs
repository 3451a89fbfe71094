//! The thread that decides for the launchers of several hosts when ranks start and end.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::channel,
    },
    thread::{self, JoinHandle},
};

use megaburn_collective::JobToken;

use super::{
    attempts::Attempts,
    formation::Formation,
    listener::{accept, listen},
    members::Members,
    wire::Shape,
};
use crate::{
    error::LaunchError, job::Job, launched::Launch, options::LaunchOptions, restart::Restarts,
    verdict::Outcome,
};

/// The thread that coordinates the launchers.
pub(super) struct Coordinator {
    own_addr: String,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Coordinator {
    /// Starts to listen.
    ///
    /// # Errors
    /// The port is taken, or there is no random number for the token.
    pub(super) fn start(
        options: &LaunchOptions,
        job: &Job,
        port: u16,
    ) -> Result<Self, LaunchError> {
        let fail = |error| LaunchError::Listen { port, error };
        let listener = listen(&job.addr, port).map_err(fail)?;
        let ip = listener.local_addr().map_err(fail)?.ip();
        let own_addr = match ip {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.to_string(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.to_string(),
            ip => ip.to_string(),
        };
        let token = job.token_of_hosts();
        let token_of_ranks = match token.is_secret() {
            true => token.clone(),
            false => JobToken::draw().map_err(LaunchError::NoToken)?,
        };
        let launch = job.launch.clone().map_or_else(Launch::begin, Ok);
        let launch = launch.map_err(LaunchError::NoToken)?;
        let (sender, incoming) = channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let over = is_over.clone();
        thread::Builder::new()
            .name("agents".into())
            .spawn(move || accept(&listener, &sender, &token, &over))
            .map_err(LaunchError::Watch)?;
        let attempts = Attempts {
            members: Members::new(options.nnodes),
            restarts: Restarts::new(options.restart),
            options: options.clone(),
            shape: Shape::of(options),
            addr: job.addr.clone(),
            port: job.port,
            token: token_of_ranks,
            launch,
            incoming,
            attempt: 0,
            formation: Formation::default(),
            outcome: Outcome::default(),
            cause: None,
            signal: None,
            is_over: is_over.clone(),
            has_started: false,
        };
        let thread = thread::Builder::new()
            .name("coordinator".into())
            .spawn(move || attempts.run())
            .map_err(LaunchError::Watch)?;
        Ok(Self {
            own_addr,
            is_over,
            thread: Some(thread),
        })
    }

    /// The address at which this host's own launcher reaches it.
    pub(super) fn own_addr(&self) -> String {
        self.own_addr.clone()
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        // A panic there has been printed, and this host's launcher has seen the connection end.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
