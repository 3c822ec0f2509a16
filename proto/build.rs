//! Compiles the `.proto` files with protox, so that no `protoc` is needed to build.

/// All files are named `api.proto`, as in Kubernetes; paths relative to one root keep them apart.
const ROOT: &str = "protos";
const FILES: [&str; 5] = [
    "registration/api.proto",
    "dra/v1/api.proto",
    "dra/v1beta1/api.proto",
    "health/v1/api.proto",
    "health/v1alpha1/api.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={ROOT}");
    tonic_prost_build::configure().compile_fds(protox::compile(FILES, [ROOT])?)?;
    Ok(())
}
