//! `megaburn completions`: scripts that complete the command line in shells.

use clap::Args;
use clap_complete::{Shell, generate};
use megaburn_train::TrainError;

use super::print;

#[derive(Args)]
pub(super) struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

impl CompletionsArgs {
    /// Prints the script of the program `command`, without its hidden commands.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub(super) fn run(self, command: clap::Command) -> Result<(), TrainError> {
        let name = command.get_name().to_string();
        let shown = command
            .get_subcommands()
            .filter(|below| !below.is_hide_set());
        let mut command = clap::Command::new("megaburn")
            .version(env!("CARGO_PKG_VERSION"))
            .subcommands(shown.cloned());
        let mut script = Vec::new();
        generate(self.shell, &mut command, name, &mut script);
        print::result(String::from_utf8_lossy(&script).trim_end())
    }
}
