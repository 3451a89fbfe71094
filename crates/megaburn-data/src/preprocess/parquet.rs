//! Reads columns of strings from Parquet files.

use std::fs::File;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use parquet::{
    basic::{Compression, Type},
    column::reader::{ColumnReader, ColumnReaderImpl},
    data_type::{ByteArray, ByteArrayType},
    errors::ParquetError,
    file::{
        metadata::ParquetMetaData,
        reader::{FileReader, RowGroupReader, SerializedFileReader},
    },
};

use crate::error::DataError;

/// Rows that are read at a time.
const ROWS: usize = 64;

/// The texts of a row, one for each column; `None` for null.
pub(super) type Row = Vec<Option<Vec<u8>>>;

/// A column whose rows are read one after another.
struct Column {
    reader: ColumnReaderImpl<ByteArrayType>,
    /// The definition level of a value that is not null.
    max_level: i16,
}

/// Gives each row after the first `skip` to `each`, with its number from 1 on and the part of the
/// file that was read, until it breaks. The columns are named by their paths, like `meta.title`.
///
/// # Errors
/// The file cannot be read, or has no such columns of strings.
pub(super) fn read(
    path: &Path,
    columns: &[String],
    skip: u64,
    mut each: impl FnMut(u64, f64, Row) -> ControlFlow<()>,
) -> Result<ControlFlow<()>, DataError> {
    let failed = |error: ParquetError| DataError::Parquet {
        path: path.into(),
        why: error.to_string(),
    };
    let file = File::open(path).map_err(|source| DataError::Io {
        path: path.into(),
        source,
    })?;
    let reader = guarded(|| SerializedFileReader::new(file)).map_err(failed)?;
    let metadata = reader.metadata();
    let indices = columns.iter().map(|column| {
        find(metadata, column).map_err(|why| DataError::Parquet {
            path: path.into(),
            why,
        })
    });
    let indices: Vec<usize> = indices.collect::<Result<_, _>>()?;
    let num_all = metadata.file_metadata().num_rows().max(1) as f64;
    let mut number = 0;
    for group in 0..metadata.num_row_groups() {
        let num_rows = metadata.row_group(group).num_rows().unsigned_abs();
        if number + num_rows <= skip {
            number += num_rows;
            continue;
        }
        let group = reader.get_row_group(group).map_err(failed)?;
        let open = |index: &usize| guarded(|| open(&*group, *index));
        let mut columns: Vec<Column> = indices
            .iter()
            .map(open)
            .collect::<Result<_, _>>()
            .map_err(failed)?;
        let end = number + num_rows;
        if number < skip {
            for column in &mut columns {
                let skipped = guarded(|| column.reader.skip_records((skip - number) as usize));
                skipped.map_err(failed)?;
            }
            number = skip;
        }
        while number < end {
            let count = ROWS.min((end - number) as usize);
            let mut rows = vec![Row::with_capacity(columns.len()); count];
            for column in &mut columns {
                guarded(|| column.read(&mut rows)).map_err(failed)?;
            }
            for row in rows {
                number += 1;
                if each(number, number as f64 / num_all, row).is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// `parquet` returns an error for most damages, and panics at the others.
fn guarded<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, ParquetError> {
    let damaged = |_| Err(ParquetError::General("its pages are damaged".into()));
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(damaged)
}

/// The index of a column of strings.
fn find(metadata: &ParquetMetaData, name: &str) -> Result<usize, String> {
    let columns = metadata.file_metadata().schema_descr().columns();
    let Some(index) = columns
        .iter()
        .position(|column| column.path().string() == name)
    else {
        let names: Vec<String> = columns
            .iter()
            .map(|column| column.path().string())
            .collect();
        return Err(format!("no column `{name}`, only [{}]", names.join(", ")));
    };
    let column = &columns[index];
    if column.max_rep_level() > 0 {
        return Err(format!("the column `{name}` has lists, not strings"));
    }
    if column.physical_type() != Type::BYTE_ARRAY {
        let kind = column.physical_type();
        return Err(format!(
            "the column `{name}` is of type {kind}, not of strings"
        ));
    }
    for group in metadata.row_groups() {
        let compression = group.column(index).compression();
        let is_read = matches!(
            compression,
            Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::GZIP(_)
        );
        if !is_read {
            return Err(format!(
                "the column `{name}` is compressed with {compression:?}; write it with Snappy or \
                gzip"
            ));
        }
    }
    Ok(index)
}

fn open(group: &dyn RowGroupReader, index: usize) -> Result<Column, ParquetError> {
    let max_level = group
        .metadata()
        .column(index)
        .column_descr()
        .max_def_level();
    match group.get_column_reader(index)? {
        ColumnReader::ByteArrayColumnReader(reader) => Ok(Column { reader, max_level }),
        _ => Err(ParquetError::General("its type has changed".into())),
    }
}

impl Column {
    /// Adds the value of this column to each row.
    fn read(&mut self, rows: &mut [Row]) -> Result<(), ParquetError> {
        let (mut levels, mut values) = (Vec::new(), Vec::<ByteArray>::new());
        let mut read = 0;
        while read < rows.len() {
            let most = rows.len() - read;
            let (records, _, _) =
                self.reader
                    .read_records(most, Some(&mut levels), None, &mut values)?;
            if records == 0 {
                let why = "it ends before its last row";
                return Err(ParquetError::EOF(why.into()));
            }
            read += records;
        }
        let mut values = values.into_iter();
        for (index, row) in rows.iter_mut().enumerate() {
            // A column that has no nulls has no levels.
            let is_null = self.max_level > 0 && levels.get(index) != Some(&self.max_level);
            let value = if is_null { None } else { values.next() };
            row.push(value.map(|value| value.data().to_vec()));
        }
        Ok(())
    }
}
