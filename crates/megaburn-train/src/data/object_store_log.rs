//! Lines about data sets that are read from object stores.

use megaburn_collective::Progress;
use megaburn_data::ObjectStoreEvent;

/// Logs what happens, and reports it to the ranks that wait.
pub(super) fn log(event: ObjectStoreEvent, progress: &Progress) {
    match event {
        ObjectStoreEvent::Retrying(retry) => {
            tracing::warn!("{retry}");
            progress.add(0);
        }
        ObjectStoreEvent::Downloading {
            url,
            path,
            num_bytes,
        } => {
            let size = num_bytes as f64 / 1e6;
            tracing::info!("copying {url} ({size:.1} MB) to {}", path.display());
            progress.expect(num_bytes);
        }
        ObjectStoreEvent::Downloaded(num_bytes) => progress.add(num_bytes),
        _ => progress.add(0),
    }
}
