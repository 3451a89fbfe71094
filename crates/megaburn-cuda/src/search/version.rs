//! Finds the version of a library before it is loaded, from its file name or its header.

use std::{fmt, fs, path::Path};

/// A version such as `9.19.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(pub(crate) [u32; 3]);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch] = self.0;
        write!(f, "{major}.{minor}.{patch}")
    }
}

/// A header that defines a library's version, and the names of the three numbers in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) name: &'static str,
    pub(crate) numbers: [&'static str; 3],
}

impl Version {
    /// The version in the file name `libNAME.so.9.14.0` or in the header in `../include`; `None` if
    /// neither exists.
    pub(crate) fn of(library: &Path, header: Header) -> Option<Self> {
        let file = library.canonicalize().ok()?;
        let name = file.file_name()?.to_str()?;
        let numbers = name.split_once(".so.").map_or("", |(_, numbers)| numbers);
        if let Some(version) = Self::three(numbers.split('.')) {
            return Some(version);
        }
        let header_file = file.parent()?.parent()?.join("include").join(header.name);
        let text = fs::read_to_string(header_file).ok()?;
        Self::three(
            header
                .numbers
                .map(|number| defined(&text, number).unwrap_or_default()),
        )
    }

    fn three<'a>(texts: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let numbers: Option<Vec<u32>> = texts
            .into_iter()
            .take(3)
            .map(|text| text.parse().ok())
            .collect();
        numbers?.try_into().ok().map(Self)
    }
}

/// The value of `#define NAME VALUE`.
fn defined<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("#define") && words.next() == Some(name)).then(|| words.next())?
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const HEADER: Header = Header {
        name: "x_version.h",
        numbers: ["X_MAJOR", "X_MINOR", "X_PATCH"],
    };

    #[test]
    fn the_files_name_says_it() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("libx.so.9.14.0"), "").unwrap();
        symlink("libx.so.9.14.0", folder.path().join("libx.so.9")).unwrap();
        let version = Version::of(&folder.path().join("libx.so.9"), HEADER).unwrap();
        assert_eq!(
            (version, version.to_string().as_str()),
            (Version([9, 14, 0]), "9.14.0")
        );
    }

    #[test]
    fn the_header_of_a_wheel_says_it() {
        let folder = tempfile::tempdir().unwrap();
        let lib = folder.path().join("lib");
        let include = folder.path().join("include");
        [&lib, &include]
            .iter()
            .for_each(|folder| fs::create_dir(folder).unwrap());
        fs::write(lib.join("libx.so.9"), "").unwrap();
        assert_eq!(Version::of(&lib.join("libx.so.9"), HEADER), None);
        let header =
            "#define X_MAJOR 9\n#define X_MINOR 19\n#define X_PATCH 2\n#define X X_MAJOR\n";
        fs::write(include.join("x_version.h"), header).unwrap();
        assert_eq!(
            Version::of(&lib.join("libx.so.9"), HEADER),
            Some(Version([9, 19, 2]))
        );
    }

    #[test]
    fn newer_versions_are_greater() {
        assert!(Version([9, 19, 0]) > Version([9, 2, 40]));
        assert!(Version([10, 0, 0]) > Version([9, 99, 99]));
    }
}
