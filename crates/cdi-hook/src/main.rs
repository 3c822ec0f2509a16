//! A hook that container runtimes run while they make a container with a GPU, as its CDI file tells them to.
//!
//! * `update-ldcache --folder DIR...`: the container's dynamic linker finds the libraries that are mounted in DIR.
//! * `create-symlinks --link TARGET::PATH...`: links that mounts cannot stand for.
//!
//! It is a `createContainer` hook (OCI runtime specification): it runs in the container's namespaces, after everything is
//! mounted and before the container's root becomes the root, so it sees the host's files and, below one directory of them,
//! the container's. What it does is repeatable, because a kubelet may ask for the same device twice.
//!
//! The image is hostile as far as this program knows. It runs nothing of it and follows none of its links out of it: every
//! path in the container is looked up by the kernel with the container's root as root ([`root`]). No process of the container
//! lives yet, but one of another container may share a volume with it and change it meanwhile, so nothing is looked up twice.
//!
//! It is linked statically: the host's C library may be older than that of the machine it was built on, and an image's
//! environment, which some runtimes give to hooks, has no say in what is loaded.
//!
//! Architecture invariant: it knows nothing of kerf, Kubernetes or NVIDIA. What to do is in its arguments.

#![forbid(unsafe_code)]

mod args;
mod container;
mod ldcache;
mod links;
mod root;

use std::process::ExitCode;

use args::Command;
use container::Container;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kerf-cdi-hook: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What fails here fails the container, and its runtime shows what was written to stderr.
fn run() -> Result<(), Box<dyn std::error::Error>> {
    let command = args::parse(std::env::args().skip(1))?;
    let container = Container::from_state(std::io::stdin().lock())?;
    match command {
        Command::UpdateLdcache(folders) => ldcache::update(&container, &folders)?,
        Command::CreateSymlinks(links) => links::create(&container, &links)?,
    }
    Ok(())
}
