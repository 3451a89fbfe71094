//! Data sets on a local server, compared with the same files on the disk.

mod faults;
mod reading;
mod stores;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use megaburn_store_server::{Fault, Server};
use tempfile::TempDir;

use super::{config::ObjectStoreConfig, event::ObjectStoreEvent};
use crate::{
    error::DataError, indexed::IndexedDataset, preprocess::PreprocessConfig,
    tokenizer::ByteTokenizer,
};

/// A data set on the disk and on a server.
struct Fixture {
    dir: TempDir,
    server: Server,
    events: Arc<Mutex<Vec<ObjectStoreEvent>>>,
}

impl Fixture {
    /// Documents of random bytes, in all about `num_bytes` tokens of 2 bytes each.
    fn new(num_bytes: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut lines = String::new();
        while lines.len() < num_bytes {
            let length = fastrand::usize(..900);
            let text: String = (0..length).map(|_| fastrand::lowercase()).collect();
            lines += &format!("{{\"text\": \"{text}\"}}\n");
        }
        let input = dir.path().join("a.jsonl");
        fs::write(&input, lines).unwrap();
        let config = PreprocessConfig::new(vec![input], dir.path().join("web"));
        config.run(&ByteTokenizer, |_| ()).unwrap();
        let fixture = Self {
            dir,
            server: Server::start(),
            events: Arc::default(),
        };
        fixture.upload("/dir/web");
        fixture
    }

    fn upload(&self, to: &str) {
        for ending in ["bin", "idx", "megaburn"] {
            let bytes = fs::read(self.prefix().with_extension(ending)).unwrap();
            self.server.put(&format!("{to}.{ending}"), &bytes);
        }
    }

    fn prefix(&self) -> PathBuf {
        self.dir.path().join("web")
    }

    fn url(&self) -> String {
        format!("{}/dir/web", self.server.address)
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    /// Small blocks, and short times so that no test waits.
    fn config(&self) -> ObjectStoreConfig {
        let events = self.events.clone();
        ObjectStoreConfig::new()
            .with_cache_dir(self.cache())
            .with_block_bytes(4096)
            .with_num_blocks(4)
            .with_first_delay(Duration::from_millis(1))
            .with_max_tries(4)
            .on_event(move |event| events.lock().unwrap().push(event))
    }

    fn open(&self) -> Result<IndexedDataset, DataError> {
        IndexedDataset::open_with(self.url(), &self.config())
    }

    fn local(&self) -> IndexedDataset {
        IndexedDataset::open(self.prefix()).unwrap()
    }

    /// The reasons of requests that were repeated.
    fn retries(&self) -> Vec<String> {
        let events = self.events.lock().unwrap();
        let why = |event: &ObjectStoreEvent| match event {
            ObjectStoreEvent::Retrying(retry) => Some(retry.why.clone()),
            _ => None,
        };
        events.iter().filter_map(why).collect()
    }
}

/// All tokens, by position.
fn all(set: &IndexedDataset) -> Vec<u32> {
    set.tokens_at(0..set.num_tokens(), 260).unwrap()
}

fn names_of(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.collect()
}
