//! Shows an error that several ranks report in the same words only once.

use std::sync::{Mutex, PoisonError};

/// How many distinct errors are compared. Any further ones are always shown.
const COMPARED: usize = 64;

/// The errors that ranks wrote so far, each with its ranks in the order in which they wrote it.
#[derive(Debug, Default)]
pub(crate) struct Repeats(Mutex<Vec<(Vec<u8>, Vec<usize>)>>);

impl Repeats {
    /// Whether this line is an error (`error: ...`) that another rank has written before.
    pub(crate) fn is_repeated(&self, rank: usize, line: &[u8]) -> bool {
        if !line.starts_with(b"error: ") {
            return false;
        }
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, ranks)) = known.iter_mut().find(|(error, _)| error == line) {
            if !ranks.contains(&rank) {
                ranks.push(rank);
            }
            return ranks[0] != rank;
        }
        if known.len() < COMPARED {
            known.push((line.to_vec(), vec![rank]));
        }
        false
    }

    /// One line per repeated error, naming the ranks whose copies were not shown.
    pub(crate) fn lines(&self) -> Vec<String> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let repeated: Vec<_> = known.iter().filter(|(_, ranks)| ranks.len() > 1).collect();
        let line = |(error, ranks): &&(Vec<u8>, Vec<usize>)| {
            let who = ranges(&ranks[1..]);
            let error = String::from_utf8_lossy(error);
            match repeated.len() {
                1 => format!("{who} wrote the same error"),
                _ => format!(
                    "{who} wrote the same as rank {}: {}",
                    ranks[0],
                    error.trim_end()
                ),
            }
        };
        repeated.iter().map(line).collect()
    }
}

/// Formats ranks as `rank 1` or `ranks 1-3, 5`.
fn ranges(ranks: &[usize]) -> String {
    let mut ranks = ranks.to_vec();
    ranks.sort_unstable();
    let runs = ranks.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        run => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    let plural = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{plural} {}", runs.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_several_ranks_is_shown_once_and_its_ranks_are_told() {
        let repeats = Repeats::default();
        let shown = |rank, line: &str| !repeats.is_repeated(rank, line.as_bytes());
        assert!(shown(2, "error: no such key\n"));
        for rank in [0, 1, 5] {
            assert!(!shown(rank, "error: no such key\n"), "rank {rank}");
        }
        assert!(shown(2, "error: no such key\n"), "a rank may repeat itself");
        assert!(
            shown(0, "a line\n") && shown(1, "a line\n"),
            "only errors are compared"
        );
        assert!(shown(3, "error: rank 3 has no GPU\n"));
        assert_eq!(repeats.lines(), ["ranks 0-1, 5 wrote the same error"]);
        assert!(!shown(4, "error: rank 3 has no GPU\n"));
        assert_eq!(
            repeats.lines()[1],
            "rank 4 wrote the same as rank 3: error: rank 3 has no GPU"
        );
    }
}
