//! Where a host is in the network.

use std::env;

use serde::{Deserialize, Serialize};

use crate::{error::LaunchError, options::LaunchOptions};

/// The longest path in bytes, so that the first message of a launcher stays short.
const LONGEST: usize = 1000;

/// The names of the switches above a host, from the outermost one to its own. Without names, the
/// place is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Topology(Vec<String>);

impl Topology {
    /// The path in the options, or else the one that Slurm has set.
    ///
    /// # Errors
    /// The path in the options is invalid.
    pub(crate) fn of(options: &LaunchOptions) -> Result<Self, LaunchError> {
        match &options.topology {
            Some(path) => Self::parse(path).map_err(|why| LaunchError::BadOptions { why }),
            None => {
                let variable = |name| env::var(name).unwrap_or_default();
                Ok(Self::of_slurm(
                    &variable("SLURM_TOPOLOGY_ADDR"),
                    &variable("SLURM_TOPOLOGY_ADDR_PATTERN"),
                ))
            }
        }
    }

    /// The switches of a path such as `spine1/leaf3`.
    pub(crate) fn parse(path: &str) -> Result<Self, String> {
        if path.is_empty() {
            return Ok(Self::default());
        }
        if path.len() > LONGEST {
            return Err(format!(
                "`--topology` has {} bytes: at most {LONGEST} are allowed; use shorter names",
                path.len()
            ));
        }
        let is_name = |name: &str| {
            !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c.is_control())
        };
        if !path.split('/').all(is_name) {
            return Err(format!(
                "`--topology` is {path:?}: give the names of the switches from the outermost one to the \
                host's own, such as `spine1/leaf3`, without spaces"
            ));
        }
        Ok(Self(path.split('/').map(Into::into).collect()))
    }

    /// The switches of an address such as `spine1.leaf3.host7`, whose last part is the host. Its
    /// pattern, such as `switch.switch.node`, says how many parts there are, since a host's name may
    /// have dots.
    fn of_slurm(address: &str, pattern: &str) -> Self {
        let parts = match pattern {
            "" => address.split('.').count(),
            pattern => pattern.split('.').count(),
        };
        let mut names: Vec<String> = address.splitn(parts, '.').map(Into::into).collect();
        names.pop();
        // Slurm leaves out the name of a switch at a level that has none above this host.
        names.retain(|name| !name.is_empty());
        // No user wrote this, so an address that is too long is no error.
        let is_long = address.len() > LONGEST;
        if is_long {
            Self::default()
        } else {
            Self(names)
        }
    }

    /// Whether the place is known.
    pub(crate) fn is_known(&self) -> bool {
        !self.0.is_empty()
    }

    /// The name of the switch at a level, from 0. `None` below the host's own.
    pub(crate) fn switch(&self, level: usize) -> Option<&str> {
        self.0.get(level).map(String::as_str)
    }

    /// The number of switches from the outermost one that are above both hosts.
    pub(crate) fn num_common(&self, other: &Self) -> usize {
        let pairs = self.0.iter().zip(&other.0);
        pairs.take_while(|(own, others)| own == others).count()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn path(text: &str) -> Topology {
        Topology::parse(text).unwrap()
    }

    #[rstest]
    #[case("spine1.leaf3.host7", "switch.switch.node", "spine1/leaf3")]
    #[case("spine1.leaf3.host7", "", "spine1/leaf3")]
    #[case("leaf3.host7.example.org", "switch.node", "leaf3")]
    #[case("block2.host7", "block.node", "block2")]
    #[case("spine[1-2].leaf3.host7", "switch.switch.node", "spine[1-2]/leaf3")]
    // Without a network that Slurm knows.
    #[case("host7", "node", "")]
    #[case("", "", "")]
    #[case("localhost.localdomain", "node", "")]
    #[case(".core.leaf3.host7", "switch.switch.switch.node", "core/leaf3")]
    fn slurm_gives_switches_and_the_host(
        #[case] address: &str,
        #[case] pattern: &str,
        #[case] expected: &str,
    ) {
        assert_eq!(Topology::of_slurm(address, pattern), path(expected));
    }

    #[rstest]
    #[case("/leaf3", "\"/leaf3\"")]
    #[case("spine1//leaf3", "\"spine1//leaf3\"")]
    #[case("spine1/", "`spine1/leaf3`")]
    #[case("spine 1", "without spaces")]
    #[case(&"s".repeat(1001), "1001 bytes")]
    fn an_invalid_path_is_refused(#[case] text: &str, #[case] said: &str) {
        let options = LaunchOptions::new(1, vec!["true".into()]).with_topology(Some(text.into()));
        let why = Topology::of(&options).unwrap_err().to_string();
        assert!(why.contains("`--topology`") && why.contains(said), "{why}");
    }

    #[test]
    fn an_empty_path_is_an_unknown_place() {
        assert!(!path("").is_known());
        assert!(path("leaf3").is_known());
    }

    #[test]
    fn common_switches_are_counted_from_the_outermost_one() {
        let own = path("spine1/leaf3");
        for (other, count) in [
            ("spine1/leaf3", 2),
            ("spine1/leaf4", 1),
            ("spine2/leaf3", 0),
            ("", 0),
        ] {
            assert_eq!(own.num_common(&path(other)), count, "{other}");
        }
    }
}
