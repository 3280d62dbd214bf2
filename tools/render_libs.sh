#!/bin/sh
# MuJoCo draws without a screen through OSMesa or EGL. Installs the system libraries where that is possible (root and
# apt-get), and otherwise says in one line what to do. Never a reason to stop: training from states needs none of it.
set -u
python="${1:-python3}"
packages="libosmesa6 libgl1 libegl1"

missing() {
    "$python" -c '
import ctypes, sys
for name in ("libOSMesa.so.8", "libGL.so.1", "libEGL.so.1"):
    try:
        ctypes.CDLL(name)
    except OSError:
        sys.exit(0)
sys.exit(1)'
}

missing || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages >/dev/null; } && exit 0
fi
echo "Rendering libraries for MuJoCo are missing. Please run: sudo apt-get install -y $packages" >&2
