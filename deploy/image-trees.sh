#!/usr/bin/env bash
# Lays out what each of kerf's images adds to its base:
#
#   deploy/image-trees.sh PROGRAMS TREES        PROGRAMS: what cargo built, target/release or target/debug; the CDI hook,
#                                               whose profile is its own, lies beside that in target/hook
#
# TREES/<image>/ is the image's root. The stage `build` of the Containerfile runs this, and so does `make images`.
# cargo-cyclonedx is on the PATH; $SOURCE_DATE_EPOCH is the time that the bills of materials name.
set -euo pipefail
umask 022 # the controller's user is not the owner of its image
programs=$(realpath "$1") trees=$(realpath -m "$2")
cd "$(dirname "$0")/.."
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-0}

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
rm -rf "$trees"

# cargo-cyclonedx writes beside every Cargo.toml, so it works on a copy, and names the folder it works in.
find . \( -name target -o -name .git \) -prune -o \( -name Cargo.toml -o -name Cargo.lock -o -name '*.rs' \) -print0 |
  tar --null --files-from=- --create | tar --directory="$copy" --extract
target=$(rustc -vV | sed -n 's/^host: //p')
cargo-cyclonedx cyclonedx --quiet --manifest-path "$copy/Cargo.toml" --format json --spec-version 1.5 --target "$target" \
  --no-build-deps --override-filename sbom
cmp -s Cargo.lock "$copy/Cargo.lock" || { echo "image-trees: Cargo.lock is not up to date" >&2; exit 1; }

# What is stripped: line tables and types. The names of functions stay, for backtraces.
tree() { # IMAGE PACKAGE FOLDER FILE...
  local image=$1 package=$2 folder=$trees/$1/$3 doc=$trees/$1/usr/share/doc/kerf
  shift 3
  mkdir -p "$folder" "$doc"
  for file in "$@"; do
    strip --strip-debug -o "$folder/$file" "$programs/$file"
    chmod 0755 "$folder/$file"
  done
  install -m 0644 LICENSE "$doc/LICENSE"
  sed "s|file://$copy|file:///kerf|g" "$copy/$package/sbom.json" >"$doc/sbom.cdx.json"
}
tree kubelet-plugin kubelet-plugin usr/bin kerf-kubelet-plugin
hook=$programs/../hook/kerf-cdi-hook
if readelf --program-headers "$hook" | grep -q INTERP; then
  echo "image-trees: $hook is not linked statically: build it as the Makefile does" >&2
  exit 1
fi
install -m 0755 "$hook" "$trees/kubelet-plugin/usr/bin/kerf-cdi-hook"
sed "s|file://$copy|file:///kerf|g" "$copy/crates/cdi-hook/sbom.json" >"$trees/kubelet-plugin/usr/share/doc/kerf/kerf-cdi-hook.cdx.json"
tree controller controller usr/bin kerf-controller
# nvml-sim looks for the library and the nvidia-smi that it installs beside itself, where no PATH leads.
tree simulator crates/nvml-sim usr/libexec/kerf nvml-sim nvidia-smi libkerf_nvml_sim.so
mkdir "$trees/simulator/usr/bin"
ln -s ../libexec/kerf/nvml-sim "$trees/simulator/usr/bin/nvml-sim"
