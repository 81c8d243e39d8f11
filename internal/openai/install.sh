#!/bin/sh
# install.sh DIR installs OpenAI's own clients from PyPI and npm: the Python one into the
# virtual environment DIR/python, the Node one into DIR/node/node_modules, which it makes
# or updates, and prints DIR's path. If these versions are there already it only prints.
set -eu

python_version=3.57.0
node_version=6.49.0 # the last one for Node 20: 7 wants 22

if [ $# -ne 1 ] || [ -z "$1" ]; then
	echo "usage: $0 DIR" >&2
	exit 2
fi
python=$1/python
node=$1/node

has_python() {
	[ -x "$python/bin/python" ] && "$python/bin/python" -I - "$python_version" <<'PYTHON'
import importlib.metadata, sys
try:
    sys.exit(importlib.metadata.version("openai") != sys.argv[1])
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
PYTHON
}

has_node() {
	manifest=$node/node_modules/openai/package.json
	[ -f "$manifest" ] && node - "$manifest" "$node_version" <<'NODE'
const [file, version] = process.argv.slice(2);
process.exit(JSON.parse(require("fs").readFileSync(file)).version === version ? 0 : 1);
NODE
}

fail() {
	echo "$0: $*" >&2
	exit 1
}

for tool in python3 node npm; do
	command -v "$tool" >/dev/null || fail "no $tool on PATH"
done

if ! has_python; then
	python3 -m venv "$python" >&2
	"$python/bin/python" -m pip install --quiet --disable-pip-version-check "openai==$python_version" >&2
	has_python || fail "$python has no openai $python_version after its installation"
fi
if ! has_node; then
	mkdir -p "$node"
	npm install --prefix "$node" --no-fund --no-audit --ignore-scripts "openai@$node_version" >/dev/null
	has_node || fail "$node has no openai $node_version after its installation"
fi
(cd "$1" && pwd)
