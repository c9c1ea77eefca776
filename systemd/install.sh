#!/bin/sh
# Installs CoServe from this folder, without a network: a virtual environment under /opt/coserve, and the service.
#
#   sudo ./install.sh [CONFIG]            CONFIG: the line's coserve.yaml, by default /etc/coserve/coserve.yaml
#   ./install.sh --prefix DIR [CONFIG]    everything under DIR, for a trial
#
# Run again after an update, it adds the new version beside the old one and points the service to it.
set -eu

fail() {
    echo "install.sh: $*" >&2
    exit 2
}

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
prefix='' config=''
while [ $# -gt 0 ]; do
    case $1 in
    --prefix)
        [ $# -gt 1 ] || fail "--prefix wants a folder"
        mkdir -p "$2"
        prefix=$(CDPATH='' cd -- "$2" && pwd)
        shift
        ;;
    -h | --help)
        sed -n '2,7s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    -*) fail "no option $1: ./install.sh --help" ;;
    *) config=$1 ;;
    esac
    shift
done
if [ -z "$prefix" ] && [ "$(id -u)" != 0 ]; then
    fail "run it with sudo, or try it with --prefix DIR"
fi

read -r version needed machine <"$here/made-for"
[ "$(uname -m)" = "$machine" ] || fail "this bundle is for $machine, not for $(uname -m)"
found=none
for python in "python$needed" python3; do
    found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
    [ "$found" = "$needed" ] && break
done
[ "$found" = "$needed" ] || fail "this bundle is for Python $needed, here is $found: make one with that (make bundle)"

(cd "$here" && sha256sum --quiet --check SHA256SUMS) || fail "the bundle is damaged: copy or unpack it again"

# One folder for each bundle: nothing changes under a daemon that runs, and the version before stays to go back to.
content=$(sha256sum "$here/SHA256SUMS" | cut -c1-8)
target="$prefix/opt/coserve/$version-$content"
if [ ! -e "$target/complete" ]; then
    rm -rf "$target"
    mkdir -p "$prefix/opt/coserve"
    "$python" -m venv --without-pip "$target"
    pip=$(echo "$here"/wheels/pip-*.whl)
    PYTHONPATH='' PIP_CONFIG_FILE=/dev/null "$target/bin/python" "$pip/pip" --isolated install --quiet \
        --no-index --no-cache-dir --no-warn-script-location --disable-pip-version-check "$here"/wheels/*.whl ||
        fail "the bundle does not hold all that it needs: make it anew (make bundle)"
    touch "$target/complete"
fi
mkdir -p "$prefix/usr/local/bin"
ln -sfn "$target/bin/coserve" "$prefix/usr/local/bin/coserve"
echo "installed  $target"

"$target/bin/coserve" install-service ${config:+"$config"} ${prefix:+--prefix "$prefix"}
