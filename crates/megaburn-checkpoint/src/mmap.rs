use std::{fs::File, io, path::Path};

use memmap2::Mmap;

/// Maps a file of a checkpoint or of a published model for reading.
pub(crate) fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the bytes behind a map must not change while it lives. Files of a committed
    // checkpoint are never written again: saving writes new files under another name and renames
    // the folder; retention unlinks files, which a map outlives. Published models are replaced in
    // the same way by megaburn and by the Hub's client. A program outside megaburn that rewrites a
    // file in place while it is being loaded breaks this.
    unsafe { Mmap::map(&file) }
}
