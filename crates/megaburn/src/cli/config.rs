//! `megaburn config`: describes the keys of a configuration.

use clap::Subcommand;
use megaburn_train::{
    TrainError,
    config::{json_schema, reference},
};

use super::print;

#[derive(Subcommand)]
pub(super) enum ConfigCommand {
    /// Print the JSON schema of configuration files, for editors: `configs/schema.json`.
    Schema,
    /// Print all keys with types, defaults and meanings as a Markdown page: `docs/config.md`.
    Reference,
}

impl ConfigCommand {
    /// Prints what was asked for.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub(super) fn run(self) -> Result<(), TrainError> {
        match self {
            Self::Schema => print::result(format!("{:#}", json_schema())),
            Self::Reference => print::result(reference().trim_end()),
        }
    }
}
