//! The kinds of faults. Each breaks a run in one way and checks what must hold afterwards.

mod convert;
mod damage;
mod files;
mod folder;
mod hosts;
mod kills;
mod numbers;
mod restarts;
mod signals;
mod stops;
mod strangers;

pub(crate) use restarts::Fault;
pub(crate) use signals::free_port;

use crate::case::Case;

/// A kind of fault; running a case of it returns a description of what was wrong.
pub(crate) type Kind = fn(&Case) -> Result<(), String>;

/// Every kind with its name, in the order in which a campaign cycles through them.
pub(crate) const KINDS: [(&str, Kind); 52] = [
    ("kill_all", kills::all),
    ("term", signals::stop),
    ("damaged_newest", damage::newest),
    ("file_kill", files::killed),
    ("kill_rank", kills::rank),
    ("folder_removed", folder::removed),
    ("stranger", strangers::noise),
    ("absurd_rate", numbers::absurd_rate),
    ("stop_rank", stops::rank),
    ("kill_launcher", kills::launcher),
    ("file_error", files::fails),
    ("foreign_files", folder::foreign_files),
    ("term_twice", signals::twice),
    ("pause_all", stops::everything),
    ("damaged_readers", damage::readers),
    ("disk_full", files::disk_full),
    ("kill_wrapper", kills::wrapper),
    ("second_run", folder::second_run),
    ("other_config", strangers::other_config),
    ("slow_disk", files::slow_disk),
    ("kill_storm", kills::storm),
    ("metrics_removed", folder::metrics_removed),
    ("term_while_waiting", signals::while_waiting),
    ("damaged_all", damage::all),
    ("convert_interrupted", convert::interrupted),
    ("pause_rank", stops::rank_for_a_moment),
    ("same_port", strangers::same_port),
    ("file_size_limit", files::size_limit),
    ("not_a_run", folder::not_a_run),
    ("damaged_then_kept", damage::then_kept),
    ("stop_in_save", stops::inside_a_save),
    ("convert_killed", convert::killed),
    ("full_output", files::full_output),
    ("init_gone", damage::init_gone),
    ("leftovers", folder::leftovers),
    ("metrics_torn", damage::metrics_torn),
    ("absurd_environment", strangers::absurd_environment),
    ("config_emptied", damage::config_emptied),
    ("kill_in_stop", signals::kill_while_saving),
    ("fresh_killed", folder::fresh_killed),
    (
        "fresh_killed_at_an_operation",
        folder::fresh_killed_at_an_operation,
    ),
    ("fresh_killed_in_removal", folder::fresh_killed_in_removal),
    ("stop_before_joining", stops::before_joining),
    ("paused_reader", stops::reader),
    ("silent_caller", strangers::silence),
    ("term_shell", signals::behind_a_shell),
    ("host_killed", hosts::killed),
    ("host_killed_again", hosts::killed_again),
    ("host_error", hosts::fails),
    ("host_lost", hosts::lost),
    ("restarts", restarts::several),
    ("bit_flip", restarts::bit_flip),
];
