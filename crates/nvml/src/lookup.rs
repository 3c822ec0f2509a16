//! Paths below a driver root, with the links on the way followed as a process chrooted into it would.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::driver_root::{DriverRoot, DriverRootError, LIBRARY_DIRS, PROGRAM_DIRS};

/// As many symbolic links as the kernel follows (path_resolution(7)).
const MAX_LINKS: u32 = 40;

/// Finds the driver's files below its root, as they were when it first came past: many files are looked for in few
/// directories, and each part of a path costs a system call. For one question, then; the next needs another.
#[derive(Debug)]
pub struct Lookup<'a> {
    root: &'a DriverRoot,
    walk: Walk<'a>,
}

impl<'a> Lookup<'a> {
    pub(crate) fn new(root: &'a DriverRoot) -> Self {
        Lookup { root, walk: Walk::below(root.path()) }
    }

    /// The driver root.
    pub fn root(&self) -> &'a DriverRoot {
        self.root
    }

    /// See [`DriverRoot::library`].
    ///
    /// # Errors
    /// [`DriverRootError::Missing`] when no library directory has it.
    pub fn library(&self, name: &str) -> Result<PathBuf, DriverRootError> {
        self.find(name, &LIBRARY_DIRS)
    }

    /// See [`DriverRoot::program`].
    ///
    /// # Errors
    /// [`DriverRootError::Missing`] when no program directory has it.
    pub fn program(&self, name: &str) -> Result<PathBuf, DriverRootError> {
        self.find(name, &PROGRAM_DIRS)
    }

    /// The directories that the driver's libraries may be in: those that exist, links followed, each once, in the order in
    /// which [`Lookup::library`] looks.
    pub fn library_dirs(&self) -> Vec<PathBuf> {
        let mut dirs: Vec<PathBuf> = Vec::new();
        for dir in LIBRARY_DIRS {
            if let Some((dir, Kind::Directory)) = self.walk.to(Path::new(dir))
                && !dirs.contains(&dir)
            {
                dirs.push(dir);
            }
        }
        dirs
    }

    /// What is at a path below the root, links followed: a file, a directory or a socket.
    pub fn resolve(&self, path: impl AsRef<Path>) -> Option<PathBuf> {
        self.walk.to(path.as_ref()).map(|(path, _)| path)
    }

    fn find(&self, name: &str, dirs: &[&str]) -> Result<PathBuf, DriverRootError> {
        let file = |dir| match self.walk.to(&Path::new(dir).join(name)) {
            Some((path, Kind::File)) => Some(path),
            _ => None,
        };
        dirs.iter().find_map(file).ok_or_else(|| DriverRootError::Missing {
            name: name.to_owned(),
            looked: dirs.iter().map(|dir| self.root.path().join(dir)).collect(),
        })
    }
}

/// What is at the end of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Directory,
    Other,
}

/// What is at one part of a path.
#[derive(Clone, Debug)]
enum Seen {
    Nothing,
    Link(PathBuf),
    Thing(Kind),
}

/// Walks paths below a root, and remembers what it has seen.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    root: &'a Path,
    seen: RefCell<HashMap<PathBuf, Seen>>,
}

impl<'a> Walk<'a> {
    pub(crate) fn below(root: &'a Path) -> Self {
        Walk { root, seen: RefCell::default() }
    }

    /// Where a path leads: an absolute link starts at the root again, and `..` does not leave it. `None` when a part is
    /// missing or the links go in circles.
    pub(crate) fn to(&self, path: &Path) -> Option<(PathBuf, Kind)> {
        let mut todo = parts(path);
        let mut done = PathBuf::new();
        let mut kind = Kind::Directory;
        let mut links = 0;
        while let Some(part) = todo.pop_front() {
            match Path::new(&part).components().next() {
                Some(Component::RootDir) => {
                    done.clear();
                    kind = Kind::Directory;
                }
                Some(Component::ParentDir) => {
                    done.pop();
                    kind = Kind::Directory;
                }
                Some(Component::Normal(name)) => match self.look(self.root.join(&done).join(name)) {
                    Seen::Nothing => return None,
                    Seen::Thing(found) => {
                        done.push(name);
                        kind = found;
                    }
                    Seen::Link(target) => {
                        links += 1;
                        if links > MAX_LINKS {
                            return None;
                        }
                        let mut before = parts(&target);
                        before.append(&mut todo);
                        todo = before;
                    }
                },
                _ => {}
            }
        }
        Some((self.root.join(done), kind))
    }

    fn look(&self, at: PathBuf) -> Seen {
        self.seen.borrow_mut().entry(at).or_insert_with_key(|at| see(at).unwrap_or(Seen::Nothing)).clone()
    }
}

fn see(at: &Path) -> Option<Seen> {
    let kind = fs::symlink_metadata(at).ok()?.file_type();
    Some(if kind.is_symlink() {
        Seen::Link(fs::read_link(at).ok()?)
    } else if kind.is_dir() {
        Seen::Thing(Kind::Directory)
    } else if kind.is_file() {
        Seen::Thing(Kind::File)
    } else {
        Seen::Thing(Kind::Other)
    })
}

fn parts(path: &Path) -> VecDeque<OsString> {
    path.components().map(|part| part.as_os_str().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    fn link(target: impl AsRef<Path>, path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    #[test]
    fn links_are_followed_below_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = DriverRoot::at(dir.path());
        let lib = dir.path().join("usr/lib/x86_64-linux-gnu");
        // Debian: the public name leads through /etc/alternatives, absolute links all the way.
        touch(&lib.join("nvidia/current/libnvidia-ml.so.535.261.03"));
        link("libnvidia-ml.so.535.261.03", &lib.join("nvidia/current/libnvidia-ml.so.1"));
        link(
            "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1",
            &dir.path().join("etc/alternatives/nvidia--libnvidia-ml.so.1"),
        );
        link("/etc/alternatives/nvidia--libnvidia-ml.so.1", &lib.join("libnvidia-ml.so.1"));

        assert_eq!(root.nvml_library().unwrap(), lib.join("nvidia/current/libnvidia-ml.so.535.261.03"));
    }

    /// `/lib` is a link to `/usr/lib` on most hosts.
    #[test]
    fn each_library_directory_is_told_once() {
        let dir = tempfile::tempdir().unwrap();
        touch(&dir.path().join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"));
        touch(&dir.path().join("usr/lib64"));
        link("usr/lib", &dir.path().join("lib"));
        let usr_lib = dir.path().join("usr/lib");
        let root = DriverRoot::at(dir.path());
        assert_eq!(root.lookup().library_dirs(), [usr_lib.join("x86_64-linux-gnu"), usr_lib]);
    }

    #[test]
    fn links_neither_leave_the_root_nor_go_round_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let root = DriverRoot::at(dir.path().join("root"));
        let lib = root.path().join("usr/lib64");
        touch(&dir.path().join("outside.so"));
        link(dir.path().join("outside.so"), &lib.join("absolute.so"));
        link("../../../outside.so", &lib.join("relative.so"));
        link("circle.so", &lib.join("circle.so"));
        fs::create_dir_all(lib.join("directory.so")).unwrap();

        for name in ["absolute.so", "relative.so", "circle.so", "directory.so"] {
            assert!(root.library(name).is_err(), "{name}");
        }
    }

    /// What was seen on one way holds for the next, a link in the middle of a path and its end in the end of another.
    #[test]
    fn ways_that_cross_lead_where_each_does_alone() {
        let dir = tempfile::tempdir().unwrap();
        let root = DriverRoot::at(dir.path());
        touch(&dir.path().join("usr/bin/nvidia-smi"));
        touch(&dir.path().join("etc/icd"));
        link("usr/bin", &dir.path().join("bin"));
        link("../../etc", &dir.path().join("usr/share/etc"));
        let paths =
            ["bin", "bin/nvidia-smi", "bin/../etc", "usr/share/etc/icd", "bin/nvidia-smi/x", "no/bin", "no", ""];
        let lookup = root.lookup();
        for path in paths.iter().chain(paths.iter().rev()) {
            assert_eq!(lookup.resolve(path), root.lookup().resolve(path), "{path}");
        }
        assert_eq!(lookup.resolve("usr/share/etc/icd"), Some(dir.path().join("etc/icd")));
        assert_eq!((lookup.resolve("no/bin"), lookup.resolve("bin/nvidia-smi/x")), (None, None));
    }
}
