//! Finding the machine's server programs, and the user to run them as.

use std::fs;
use std::path::{Path, PathBuf};

/// The program of this name: in the distribution's usual folders, newest version first, then on PATH.
///
/// The versioned folders come first because what PATH has may be a wrapper that wants a cluster of the system's.
pub(crate) fn find(name: &str, package: &str) -> PathBuf {
    let mut folders = versioned("/usr/lib/postgresql");
    if let Some(path) = std::env::var_os("PATH") {
        folders.extend(std::env::split_paths(&path));
    }
    folders.extend(["/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/usr/bin"].map(PathBuf::from));
    folders
        .into_iter()
        .map(|folder| folder.join(name))
        .find(|program| program.is_file())
        .unwrap_or_else(|| {
            panic!(
                "these tests need the program `{name}`, and it is not on this machine; install the package \
                 `{package}` (Debian, Ubuntu: apt-get install {package})"
            )
        })
}

/// `root/15/bin` and its like, the highest version first.
fn versioned(root: &str) -> Vec<PathBuf> {
    let mut versions: Vec<(u32, PathBuf)> = fs::read_dir(root)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
        .collect();
    versions.sort_by_key(|(version, _)| std::cmp::Reverse(*version));
    versions.into_iter().map(|(_, bin)| bin).collect()
}

/// Whom to run servers as: nobody in particular where this run is no root's, since PostgreSQL and PgBouncer refuse
/// root.
#[derive(Debug, Clone, Copy)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

impl User {
    /// The user to change to, if this run is root's: `postgres` where it exists, else `nobody`.
    pub(crate) fn unprivileged(own_folder: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;
        // Without unsafe code the standard library does not tell who we are, but a file that we made does.
        let own = fs::metadata(own_folder).unwrap_or_else(|error| panic!("{}: {error}", own_folder.display()));
        if own.uid() != 0 {
            return None;
        }
        let users = fs::read_to_string("/etc/passwd").unwrap_or_else(|error| panic!("/etc/passwd: {error}"));
        ["postgres", "nobody"].into_iter().find_map(|name| {
            let line = users.lines().find(|line| line.split(':').next() == Some(name))?;
            let mut fields = line.split(':').skip(2);
            Some(Self {
                uid: fields.next()?.parse().ok()?,
                gid: fields.next()?.parse().ok()?,
            })
        })
    }
}
