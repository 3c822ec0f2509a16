#!/usr/bin/env bash
# Gets NVIDIA's own nvidia-smi and MPS programs into DIR/usr/bin, from Debian's non-free component:
#
#   .ci/nvidia-programs.sh [DIR]        default: ~/.cache/kerf/nvidia-programs
#
# They are NVIDIA's proprietary programs, redistributed by Debian. Tests run them as judges of the simulated driver;
# they are never committed and never shipped.
#
# The machine's apt configuration stays as it is: the archive is the one that the machine itself uses for Debian, with
# the component non-free added in a source list, a package index and a cache that live in a folder of their own.
set -euo pipefail

version=535.261.03
packages=(nvidia-smi nvidia-cuda-mps)
programs=(nvidia-smi nvidia-cuda-mps-control nvidia-cuda-mps-server)

dir=${1:-${HOME:?}/.cache/kerf/nvidia-programs}
stamp=$dir/.version

fail() {
    printf 'nvidia-programs: %s\n' "$*" >&2
    exit 1
}

if [ "$(cat "$stamp" 2>/dev/null)" = "$version" ]; then
    echo "nvidia-programs: $version is in $dir/usr/bin already"
    exit 0
fi

[ "$(dpkg --print-architecture)" = amd64 ] || fail "the programs of $version are taken for amd64 only"

# The archive of the running release: the source of the component main whose suite has no suffix such as -updates.
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
read -r archive suite < <(
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
        awk -v codename="$codename" '$3 == "main" && ($2 == codename || $2 == "stable" || $2 == "oldstable") { print $1, $2; exit }'
) || fail "no apt source of this machine offers the component main of Debian $codename"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$work/parts" "$work/tree"
cat >"$work/sources.list" <<LIST
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive $suite non-free
LIST

# apt hands the download to an unprivileged user, who cannot enter a private temporary folder: do it as ourselves.
apt=(
    -o "Dir::Etc::SourceList=$work/sources.list" -o "Dir::Etc::SourceParts=$work/parts"
    -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache"
    -o APT::Sandbox::User=root -o Acquire::Retries=3
)
apt-get "${apt[@]}" -qq update || fail "cannot read the component non-free of $archive $suite"

for package in "${packages[@]}"; do
    full=$(apt-cache "${apt[@]}" madison "$package" | awk -F'|' -v v="$version" '{ gsub(/ /, "", $2) } index($2, v "-") == 1 { print $2; exit }')
    [ -n "$full" ] || fail "$archive $suite non-free has no $package $version (it has: $(
        apt-cache "${apt[@]}" madison "$package" | awk -F'|' '{ print $2 }' | tr -d ' ' | paste -sd' '
    ))"
    (cd "$work/debs" && apt-get "${apt[@]}" -qq download "$package=$full") || fail "cannot download $package $full"
done

for deb in "$work"/debs/*.deb; do
    dpkg -x "$deb" "$work/tree"
done

mkdir -p "$dir/usr/bin"
for program in "${programs[@]}"; do
    # Debian keeps the programs of several driver branches side by side, and may put a shell wrapper in usr/bin.
    found=$(find "$work/tree" -type f -name "$program" -exec sh -c 'head -c 4 "$1" | grep -q ELF' _ {} \; -print | head -n 1)
    [ -n "$found" ] || fail "the downloaded packages hold no program $program"
    install -m 0755 "$found" "$dir/usr/bin/$program"
done
echo "$version" >"$stamp"
echo "nvidia-programs: $version is in $dir/usr/bin"
