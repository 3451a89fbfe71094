//! Text in columns.

/// Rows of cells, printed with each column as wide as its widest cell.
#[derive(Debug)]
pub(super) struct Table<const N: usize> {
    /// Whether a column holds numbers, which are aligned to the right.
    is_number: [bool; N],
    rows: Vec<[String; N]>,
}

impl<const N: usize> Table<N> {
    pub(super) fn new(is_number: [bool; N]) -> Self {
        Self {
            is_number,
            rows: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, row: [String; N]) {
        self.rows.push(row);
    }

    /// The rows as lines, with two spaces between columns.
    pub(super) fn lines(&self) -> Vec<String> {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0)
        };
        let widths: [usize; N] = std::array::from_fn(width);
        let line = |row: &[String; N]| {
            let cells = row.iter().enumerate().map(|(column, cell)| {
                let width = widths[column];
                match self.is_number[column] {
                    true => format!("{cell:>width$}"),
                    false => format!("{cell:<width$}"),
                }
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
        };
        self.rows.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new([false, true, false]);
        assert!(table.lines().is_empty());
        table.push(["a", "100", "x"].map(String::from));
        table.push(["äöü", "7", ""].map(String::from));
        assert_eq!(table.lines(), ["a    100  x", "äöü    7"]);
    }
}
