//! A folder of objects in memory, of which one request fails.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Write},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use megaburn_store::{ListedObject, ObjectFolder, Obstacle, StoreError, Transfer};

/// How a request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It has no effect.
    Before,
    /// It has its effect, and its answer is lost.
    After,
    /// Neither it nor any later one has an effect, as if the process were killed.
    Killed,
}

#[derive(Debug)]
pub(crate) struct MemoryFolder {
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
    fault: Fault,
    /// The number of the request that fails.
    at: usize,
    num_requests: AtomicUsize,
}

impl Default for MemoryFolder {
    fn default() -> Self {
        Self::faulty(BTreeMap::new(), Fault::Before, usize::MAX)
    }
}

impl MemoryFolder {
    /// A folder with these objects, whose request number `at` fails.
    pub(crate) fn faulty(objects: BTreeMap<String, Vec<u8>>, fault: Fault, at: usize) -> Self {
        Self {
            objects: Mutex::new(objects),
            fault,
            at,
            num_requests: AtomicUsize::new(0),
        }
    }

    pub(crate) fn objects(&self) -> BTreeMap<String, Vec<u8>> {
        self.objects.lock().unwrap().clone()
    }

    pub(crate) fn object(&self, name: &str) -> Option<Vec<u8>> {
        self.objects.lock().unwrap().get(name).cloned()
    }

    pub(crate) fn num_requests(&self) -> usize {
        self.num_requests.load(Ordering::Relaxed)
    }

    fn error(&self, name: &str, obstacle: Obstacle, why: String) -> StoreError {
        StoreError::Object {
            url: format!("{}/{name}", self.url()),
            action: "used",
            obstacle,
            why,
            remedy: "run the test again".into(),
        }
    }

    fn request<T>(
        &self,
        name: &str,
        work: impl FnOnce(&mut BTreeMap<String, Vec<u8>>) -> T,
    ) -> Result<T, StoreError> {
        let number = self.num_requests.fetch_add(1, Ordering::Relaxed);
        let failed = || self.error(name, Obstacle::Other, format!("request {number} fails"));
        let objects = &mut self.objects.lock().unwrap();
        match self.fault {
            Fault::Before if number == self.at => Err(failed()),
            Fault::Killed if number >= self.at => Err(failed()),
            Fault::After if number == self.at => {
                work(objects);
                Err(failed())
            }
            _ => Ok(work(objects)),
        }
    }
}

impl ObjectFolder for MemoryFolder {
    fn url(&self) -> &str {
        "memory://store"
    }

    fn list(&self) -> Result<Vec<ListedObject>, StoreError> {
        let listed = |(name, bytes): (&String, &Vec<u8>)| ListedObject {
            name: name.clone(),
            num_bytes: bytes.len() as u64,
            modified: None,
        };
        self.request("", |objects| objects.iter().map(listed).collect())
    }

    fn read(&self, name: &str, _: u64) -> Result<Vec<u8>, StoreError> {
        let found = self.request(name, |objects| objects.get(name).cloned())?;
        found.ok_or_else(|| self.error(name, Obstacle::Missing, "it is missing".into()))
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.request(name, |objects| {
            objects.insert(name.into(), bytes.to_vec());
        })
    }

    fn upload(&self, name: &str, mut from: &File, _: &Transfer<'_>) -> Result<u64, StoreError> {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        self.put(name, &bytes)?;
        Ok(bytes.len() as u64)
    }

    fn download(
        &self,
        name: &str,
        num_bytes: u64,
        mut to: &File,
        _: &Transfer<'_>,
    ) -> Result<(), StoreError> {
        to.write_all(&self.read(name, num_bytes)?).unwrap();
        Ok(())
    }

    fn delete(&self, name: &str) -> Result<(), StoreError> {
        self.request(name, |objects| {
            objects.remove(name);
        })
    }
}
