#!/usr/bin/env bash
# Builds kerf's images from what cargo built, without a registry and without an engine:
#
#   .ci/images.sh PROGRAMS OUT BASE        such as target/debug target/images ~/.cache/kerf/base-image/current.tar
#
# The CDI hook is taken from PROGRAMS/../hook, where its own profile puts it (`make`).
#
# OUT/<image>.tar is an OCI archive that calls itself localhost/kerf-<image>:dev, OUT/<image>.cdx.json its bill of materials.
# An image whose inputs are as they were is not built again.
set -euo pipefail
programs=$(realpath "$1") out=$(realpath -m "$2") base=$(realpath "$3")
cd "$(dirname "$0")/.."

command -v buildah >/dev/null || { echo "images: buildah is missing: run make setup" >&2; exit 1; }
mkdir -p "$out"
exec 9>"$out/.lock"
flock 9
rm -rf "$out"/.work.* # of a run that was killed: the lock says that it is over
work=$(mktemp -d "$out/.work.XXXXXX")
trap 'rm -rf "$work"' EXIT

version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
revision=$(git describe --always --dirty --abbrev=40 --exclude='*' 2>/dev/null || echo unknown)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
export SOURCE_DATE_EPOCH
deploy/image-trees.sh "$programs" "$work/trees"

inputs() { # IMAGE
  buildah --version
  echo "$base $version $revision $SOURCE_DATE_EPOCH"
  cat .ci/images.sh deploy/Containerfile
  tar --directory="$work/trees/$1" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --create .
}
storage() { buildah --storage-driver vfs --root "$work/storage" --runroot "$work/run" "$@"; }

for image in kubelet-plugin controller simulator; do
  archive=$out/$image.tar name=localhost/kerf-$image:dev
  digest=$(inputs $image | sha256sum)
  if [ ! -f "$archive" ] || [ "$(cat "$archive.inputs" 2>/dev/null)" != "$digest" ]; then
    rm -f "$archive.inputs"
    storage bud --quiet --layers --isolation chroot --format oci --timestamp "$SOURCE_DATE_EPOCH" --file deploy/Containerfile --target $image \
      --build-arg BASE_IMAGE="oci-archive:$base" --build-context build="$work" \
      --build-arg VERSION="$version" --build-arg REVISION="$revision" --tag "$name" . >/dev/null
    storage push --quiet "$name" "oci-archive:$work/$image.tar:$name"
    mv "$work/$image.tar" "$archive"
    install -m 0644 "$work/trees/$image/usr/share/doc/kerf/sbom.cdx.json" "$out/$image.cdx.json"
    echo "$digest" >"$archive.inputs"
  fi
  digest=$(tar --extract --to-stdout --file "$archive" index.json | grep -o 'sha256:[0-9a-f]*')
  echo "$name $digest, $(du --apparent-size --block-size=K "$archive" | cut -f 1)"
done
