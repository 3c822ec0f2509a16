//! Links in the container that mounts cannot stand for: those of device nodes, and those whose name a package of the image
//! has for a link of its own.

use std::path::Path;

use crate::args::Link;
use crate::container::Container;
use crate::root::{Linked, Mounts, RootError};

/// Makes links. What cannot be made because of what the image or the pod has there is left out: the container is of use
/// without it.
pub(crate) fn create(container: &Container, links: &[Link]) -> Result<(), RootError> {
    for Link { target, path } in links {
        match make(container, target, path) {
            Ok(Linked::Done) => {}
            Ok(Linked::Occupied) => eprintln!("kerf-cdi-hook: {} is no link, and stays", path.display()),
            Err(error) if error.is_of_the_container() => eprintln!("kerf-cdi-hook: left out: {error}"),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn make(container: &Container, target: &str, path: &Path) -> Result<Linked, RootError> {
    // The runtime's own tmpfs, or a volume of the pod, is all the `/dev` that a container has.
    let mounts = if path.starts_with("/dev") { Mounts::Cross } else { Mounts::Stay };
    let directory = container.root.make_directory(path.parent().unwrap_or(Path::new("/")), mounts)?;
    container.root.link(&directory, path, target)
}
