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
export LC_ALL=C # what is sorted comes out the same everywhere
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

# The licence texts of what is linked in, each once, with the crates that have it.
third_party() { # IMAGE PACKAGE...
  local image=$1 texts crate license file sum found
  texts=$(mktemp -d -p "$copy")
  shift
  cargo tree --quiet --locked --offline --edges normal --target "$target" --prefix none --format '{p}|{l}' \
    "${@/#/--package=}" | sed 's/ (proc-macro)//; s/ (\*)$//' | grep '|' | grep -v ' (/' | sort -u >"$texts/crates"
  while IFS='|' read -r crate license; do
    found=
    for file in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/"${crate/ v/-}"/*; do
      [[ -f $file && ${file##*/} =~ ^(LICEN[CS]E|COPYING|NOTICE|COPYRIGHT|UNLICENSE|licen[cs]e) ]] || continue
      sum=$(sha256sum <"$file" | cut -d' ' -f1)
      [ -e "$texts/$sum" ] || { cp "$file" "$texts/$sum"; echo "$sum" >>"$texts/order"; }
      echo "  $crate (${file##*/})" >>"$texts/$sum.of"
      found=yes
    done
    [ -n "$found" ] || echo "  $crate: $license" >>"$texts/without"
  done <"$texts/crates"
  [ -s "$texts/order" ] || { echo "image-trees: no licence of any crate was found" >&2; exit 1; }
  {
    while read -r sum; do
      printf '%s\n' "Licence text in the packages of"
      cat "$texts/$sum.of"
      printf '\n'
      cat "$texts/$sum"
      printf '\n%s\n\n' "------------------------------------------------------------------------"
    done <"$texts/order"
    [ ! -e "$texts/without" ] || { printf '%s\n' "Packages without a text of their own, and their licence"; cat "$texts/without"; }
  } >"$trees/$image/usr/share/doc/kerf/third-party-licenses.txt"
}

tree kubelet-plugin kubelet-plugin usr/bin kerf-kubelet-plugin
third_party kubelet-plugin kerf-kubelet-plugin kerf-cdi-hook
hook=$programs/../hook/kerf-cdi-hook
if readelf --program-headers "$hook" | grep -q INTERP; then
  echo "image-trees: $hook is not linked statically: build it as the Makefile does" >&2
  exit 1
fi
install -m 0755 "$hook" "$trees/kubelet-plugin/usr/bin/kerf-cdi-hook"
sed "s|file://$copy|file:///kerf|g" "$copy/crates/cdi-hook/sbom.json" >"$trees/kubelet-plugin/usr/share/doc/kerf/kerf-cdi-hook.cdx.json"
tree controller controller usr/bin kerf-controller
third_party controller kerf-controller
# nvml-sim looks for the library and the nvidia-smi that it installs beside itself, where no PATH leads.
tree simulator crates/nvml-sim usr/libexec/kerf nvml-sim nvidia-smi libkerf_nvml_sim.so
third_party simulator kerf-nvml-sim
mkdir "$trees/simulator/usr/bin"
ln -s ../libexec/kerf/nvml-sim "$trees/simulator/usr/bin/nvml-sim"
