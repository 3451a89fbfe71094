//! Errors that NVIDIA's driver wrote to the log of the kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::Read,
    os::unix::fs::OpenOptionsExt,
};

use nix::fcntl::OFlag;

/// The numbers of the Xid errors in the kernel's log, by the PCI address of the GPU. `None` if the
/// log cannot be read, as without privileges.
pub(crate) fn xids() -> Option<BTreeMap<String, BTreeSet<u32>>> {
    let mut log = File::options()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open("/dev/kmsg")
        .ok()?;
    let mut text = String::new();
    // Each read returns one record; the last one fails instead of waiting for the next.
    let mut record = [0; 8192];
    while let Ok(bytes) = log.read(&mut record)
        && bytes > 0
    {
        text.push_str(&String::from_utf8_lossy(&record[..bytes]));
    }
    Some(in_text(&text))
}

/// The errors in lines such as `NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, ...`.
fn in_text(text: &str) -> BTreeMap<String, BTreeSet<u32>> {
    let mut found: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    for line in text.lines() {
        let Some((_, rest)) = line.split_once("NVRM: Xid (PCI:") else {
            continue;
        };
        let Some((address, rest)) = rest.split_once("): ") else {
            continue;
        };
        let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
        if let Ok(number) = number.parse() {
            found.entry(address.to_string()).or_default().insert(number);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_each_gpu_are_found_once() {
        let log = "6,1,2,-;usb 1-1: new device\n\
            4,2,3,-;NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n\
            4,3,4,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=12, GPU has fallen off the bus.\n\
            4,4,5,-;NVRM: Xid (PCI:0000:43:00): 94, pid=1, Contained ECC error\n\
            4,5,6,-;NVRM: Xid (PCI:0000:43:00): \n";
        let found = in_text(log);
        assert_eq!(found["0000:1b:00"], [79].into());
        assert_eq!(found["0000:43:00"], [94].into());
        assert_eq!(found.len(), 2);
    }
}
