#!/usr/bin/env bash
# Makes the base of kerf's images from Debian packages, for machines that reach no registry:
#
#   .ci/base-image.sh [DIR]        default: ~/.cache/kerf/base-image
#
# It stands in for gcr.io/distroless/cc-debian12: glibc, libgcc_s, a few files in /etc, no shell. The packages are those of
# the running release, whose glibc the programs are linked with. DIR keeps an OCI archive for each set of their versions;
# DIR/current.tar leads to the last.
set -euo pipefail
umask 022 # who runs in the image does not own it

self=$(realpath "$0")
dir=$(realpath -m "${1:-${HOME:?}/.cache/kerf/base-image}")

fail() {
    printf 'base-image: %s\n' "$*" >&2
    exit 1
}

# gcc-<release>-base holds the licence of libgcc-s1, and no more.
packages=(base-files libc6 libgcc-s1 "$(dpkg-query --show --showformat '${Depends}' libgcc-s1 | grep -o 'gcc-[0-9]*-base' | sort -u)")
# apt hands a download to an unprivileged user, who cannot enter a private temporary folder: do it as ourselves.
download() {
    apt-get -qq -o APT::Sandbox::User=root -o Acquire::Retries=3 "$@" download "${packages[@]}"
}
# One line a package: file name and SHA-256.
versions() { download --print-uris | awk '{ print $2, $NF }' | sort; }

found=$(versions 2>/dev/null) || found=
if [ -z "$found" ]; then
    apt-get -qq update || fail "cannot read the package lists"
    found=$(versions) || fail "apt offers no libc6"
fi
archive() { echo "$dir/$({ cat "$self"; echo "$found"; } | sha256sum | cut -c 1-16).tar"; }
archive=$(archive)
finish() {
    ln -sfn "$(basename "$archive")" "$dir/current.tar"
    echo "base-image: $archive"
}
if [ -f "$archive" ]; then
    finish
    exit 0
fi

mkdir -p "$dir"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/debs" "$work/root"
cd "$work/debs"
if ! download >/dev/null 2>&1; then
    # The lists are older than the archive.
    apt-get -qq update || fail "cannot read the package lists"
    found=$(versions)
    archive=$(archive)
    download >/dev/null || fail "cannot download: $found"
fi

root=$work/root
mkdir -p "$root/var/lib/dpkg/status.d"
for deb in "$work"/debs/*.deb; do
    dpkg-deb --extract "$deb" "$root"
    # Where scanners look for the packages of an image without dpkg.
    dpkg-deb --field "$deb" >"$root/var/lib/dpkg/status.d/$(dpkg-deb --field "$deb" Package)"
done
find "$root/usr/share/doc" -type f ! -name copyright -delete
find "$root/usr/share/doc" -type d -empty -delete
rm -rf "$root"/usr/lib/*/gconv "$root"/usr/lib/*/audit "$root"/usr/share/{base-files,bug,info,lintian,locale,man} \
    "$root"/etc/{default,dpkg,host.conf,issue*,ld.so.conf.d,motd,profile.d,update-motd.d}
# As the packages' own scripts would make them.
rm -rf "$root/var/run" "$root/var/lock"
ln -s /run "$root/var/run"
ln -s /run/lock "$root/var/lock"
echo 'hosts: files dns' >"$root/etc/nsswitch.conf"
cat >"$root/etc/passwd" <<'PASSWD'
root:x:0:0:root:/root:/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin
nonroot:x:65532:65532:nonroot:/nonexistent:/sbin/nologin
PASSWD
cat >"$root/etc/group" <<'GROUP'
root:x:0:
nobody:x:65534:
nonroot:x:65532:
GROUP

buildah() { command buildah --storage-driver vfs --root "$work/storage" --runroot "$work/run" "$@"; }
cat >"$work/Containerfile" <<'CONTAINERFILE'
FROM scratch
COPY / /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CONTAINERFILE
buildah bud --quiet --isolation chroot --format oci --timestamp 0 --file "$work/Containerfile" --tag base "$root" >/dev/null
buildah push --quiet base "oci-archive:$work/base.tar:localhost/kerf-base:1"
mv "$work/base.tar" "$archive"
finish
