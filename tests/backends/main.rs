//! What runs on which of Burn's backends: runs collectives, layers and small trainings on each that is
//! built in, and compares with Flex. The table of `docs/backends.md` must be what is found.
//!
//! ```sh
//! cargo test -p megaburn-tests --test backends --features ndarray
//! cargo test -p megaburn-tests --test backends --features ndarray,wgpu
//! ```
//!
//! `-- --write` writes the table instead, and `-- TEXT` runs only the rows whose name has this text.

mod collectives;
mod layers;
mod rows;
mod table;
mod training;
mod world;

use std::{env, process::ExitCode, time::Instant};

use burn::prelude::Device;

use crate::{
    rows::{Row, rows},
    table::{Cell, Table},
};

/// The backends of the table, and the device of each that is built in.
fn backends() -> [(&'static str, Option<Device>); 3] {
    #[cfg(feature = "ndarray")]
    #[expect(deprecated, reason = "Burn still has it")]
    let ndarray = Some(Device::ndarray());
    #[cfg(not(feature = "ndarray"))]
    let ndarray = None;
    #[cfg(feature = "wgpu")]
    let wgpu = Some(Device::wgpu(burn::tensor::DeviceKind::DefaultDevice));
    #[cfg(not(feature = "wgpu"))]
    let wgpu = None;
    [
        ("Flex", Some(Device::flex())),
        ("NdArray", ndarray),
        ("wgpu", wgpu),
    ]
}

/// Runs a row on a backend. Prints why, if it does not run.
fn cell(row: &Row, backend: &str, device: &Device) -> Cell {
    let begun = Instant::now();
    let found = row.run(device);
    let name = &row.name;
    let seconds = begun.elapsed().as_secs_f64();
    match found {
        Ok(distance) => {
            println!("{name} on {backend}: at most {distance:.1e} from Flex, {seconds:.1} s");
            Cell::Yes
        }
        Err(why) => {
            println!("{name} on {backend}: no: {why}");
            Cell::No
        }
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let writes = args.iter().any(|arg| arg == "--write");
    let text = args.iter().find(|arg| !arg.starts_with("--"));
    let is_chosen = |row: &Row| text.is_none_or(|text| row.name.contains(text));

    let mut table = Table::read();
    let mut wrong = Vec::new();
    let all = rows();
    for row in all.iter().filter(|row| is_chosen(row)) {
        for (backend, device) in &backends() {
            let Some(device) = device else { continue };
            let found = cell(row, backend, device);
            if table.set(&row.name, backend, found) {
                wrong.push(format!("{} on {backend}: found {found}", row.name));
            }
        }
    }
    training::clean();
    let names: Vec<&str> = all.iter().map(|row| row.name.as_str()).collect();
    if writes {
        table.write(&names);
        return ExitCode::SUCCESS;
    }
    wrong.extend(table.unknown(&names));
    if wrong.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("differs from {}: {wrong:#?}", table::PAGE);
    ExitCode::FAILURE
}
