//! Figures of measurements compared with the previous ones, as `.ci/gpu-check` prints them, on the
//! reports below.

use std::{collections::BTreeMap, fs, path::Path};

use megaburn_benches::figures::{Figures, compare, read};

const REPORT: &str = "# kernels, 2026-11-25

About.

- machine: 2 GPUs, NVIDIA H200, 580.159.04; Some Processor, 16 cores
- commit: 1234567890 (a remark)

### Products

| shape | form  |  ms | TFLOP/s | PyTorch | ratio | PyTorch ms | TB/s | TB/s |
|-------|------:|----:|--------:|--------:|------:|-----------:|-----:|-----:|
| 64x64 | fprop | 1.0 |     700 |     710 | 0.986 |        0.9 |  4.1 |  4.0 |
| 64x64 | dgrad | 2.0 |     350 |         |       |            |  3.9 |  4.0 |
| torch | dgrad | 3.0 |     300 |         |       |            |  3.9 |  4.0 |
";

fn figures(text: &str) -> Figures {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("more")).unwrap();
    fs::write(folder.path().join("more/2026-11-25-kernels.md"), text).unwrap();
    fs::write(
        folder.path().join("notes.md"),
        "Nothing is measured here.\n",
    )
    .unwrap();
    let mut cards = read(folder.path()).unwrap();
    cards.remove("NVIDIA H200").unwrap()
}

#[test]
fn cells_are_figures_of_their_row_and_column() {
    let found = figures(REPORT);
    let value = |row: &str| {
        found
            .figures
            .get(&format!("kernels / Products / {row}"))
            .map(|f| f.value)
    };
    assert_eq!(value("64x64, fprop / ms"), Some(1.0));
    assert_eq!(value("64x64, dgrad / TFLOP/s"), Some(350.0));
    assert_eq!(value("64x64, fprop / peer PyTorch"), Some(710.0));
    // The second column of that name belongs to the peer.
    assert_eq!(value("64x64, fprop / TB/s"), Some(4.1));
    assert_eq!(value("64x64, fprop / peer TB/s"), Some(4.0));
    assert_eq!(value("64x64, fprop / ratio"), None);
    let of = &found.figures["kernels / Products / 64x64, fprop / ms"];
    assert_eq!(
        (of.date.as_str(), of.commit.as_str()),
        ("2026-11-25", "1234567890")
    );
}

/// A file of results has the newest section first.
#[test]
fn the_newest_section_of_a_file_counts() {
    let older = REPORT.replace("2026-11-25", "2026-11-24");
    let newer = REPORT.replace("| 64x64 | fprop | 1.0 |", "| 64x64 | fprop | 0.5 |");
    let file = format!("# kernels\n\nAll of them.\n\n#{newer}\n#{older}");
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("kernels.md"), file).unwrap();
    let found = &read(folder.path()).unwrap()["NVIDIA H200"].figures;
    assert_eq!(*found, figures(&newer).figures);
    assert_eq!(found["kernels / Products / 64x64, fprop / ms"].value, 0.5);
}

#[test]
fn ours_that_are_three_percent_slower_are_marked() {
    let last = figures(REPORT);
    // Slower in time, in operations and in bytes; then a slower peer, and a change within 3%.
    let slower = REPORT
        .replace("| fprop | 1.0 |     700 |", "| fprop | 1.04 |     678 |")
        .replace("| dgrad | 2.0 |     350 |", "| dgrad | 2.05 |     360 |")
        .replace("| torch | dgrad | 3.0 |", "| torch | dgrad | 9.0 |")
        .replace("0.986 |        0.9 |  4.1 |", "0.986 |        1.9 |  4.1 |");
    let changes = compare(&figures(&slower), &last);
    let marked: Vec<&str> = changes
        .iter()
        .filter(|change| change.is_slower())
        .map(|change| &change.place[..])
        .collect();
    assert_eq!(
        marked,
        [
            "kernels / Products / 64x64, fprop / TFLOP/s",
            "kernels / Products / 64x64, fprop / ms"
        ]
    );
    let peers = changes
        .iter()
        .find(|change| change.place.ends_with("fprop / peer PyTorch ms"));
    assert!(
        peers.unwrap().worse.unwrap() > 100.0,
        "it is printed all the same"
    );
    // Without previous figures nothing is marked.
    let none = compare(&last, &Figures::default());
    assert!(
        none.iter()
            .all(|change| change.last.is_none() && !change.is_slower())
    );
}

/// The committed figures match the committed reports.
#[test]
fn committed_figures_are_in_committed_reports() {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/results");
    let reports = read(&results).unwrap();
    let mut compared = 0;
    for entry in fs::read_dir(results.join("figures")).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        let kept: Figures = serde_json::from_str(&text).unwrap();
        let empty = BTreeMap::new();
        let of_reports = reports.get(&kept.card).map_or(&empty, |card| &card.figures);
        for (place, figure) in of_reports {
            let kept = kept.figures.get(place);
            let kept = kept.unwrap_or_else(|| panic!("{}: {place} is missing", kept_name(&text)));
            assert!(
                kept.date >= figure.date,
                "{place} is of {}, older than {}",
                kept.date,
                figure.date
            );
            compared += 1;
        }
    }
    assert!(compared > 50, "only {compared} figures");
}

fn kept_name(text: &str) -> &str {
    text.lines().nth(1).unwrap_or_default()
}
