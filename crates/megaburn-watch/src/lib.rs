//! A page that shows training runs while they train.
//!
//! A [`Server`] serves one page and what the page asks for: the runs that there are, what is new in
//! the `metrics.jsonl` of each, and its configuration. It only reads, and only files of the folders
//! that it was given: no path is made of a request.
//!
//! The page is part of the program and needs no network: `page/` has its HTML, CSS and JavaScript.
//! [`RunFiles`] says which files of a folder are a run's, so that this crate needs no trainer.
//!
//! ```
//! use std::{io::{Read, Write}, net::TcpStream, path::{Path, PathBuf}, sync::Arc};
//!
//! use megaburn_watch::{RunFiles, Runs, Server};
//!
//! struct Plain;
//!
//! impl RunFiles for Plain {
//!     fn metrics(&self, run: &Path) -> PathBuf {
//!         run.join("metrics.jsonl")
//!     }
//!     fn state(&self, run: &Path) -> PathBuf {
//!         run.join("state.json")
//!     }
//!     fn config(&self, run: &Path) -> PathBuf {
//!         run.join("config.toml")
//!     }
//! }
//!
//! # let folder = std::env::temp_dir().join(format!("watched-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder).unwrap();
//! std::fs::write(folder.join("metrics.jsonl"), "{\"step\":1,\"loss\":5.5}\n").unwrap();
//! let runs = Runs::new(vec![folder.clone()], Arc::new(Plain))?;
//! let server = Server::bind("127.0.0.1", 0, runs)?;
//! let address = server.address();
//! server.spawn()?;
//!
//! let mut stream = TcpStream::connect(address).unwrap();
//! write!(stream, "GET /api/runs/0/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
//! let mut answer = String::new();
//! stream.read_to_string(&mut answer).unwrap();
//! assert!(answer.contains("\"loss\":{\"step\":[1]"), "{answer}");
//! # std::fs::remove_dir_all(&folder).unwrap();
//! # Ok::<(), megaburn_watch::WatchError>(())
//! ```

// Errors are values; the panics that remain are documented.
#![deny(clippy::unwrap_used, clippy::panic)]
// These macros panic if their output cannot be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod config_keys;
mod error;
mod http;
mod metrics;
mod page;
mod routes;
mod run_files;
mod runs;
mod server;

pub use error::WatchError;
pub use run_files::RunFiles;
pub use runs::{Found, Runs};
pub use server::Server;
