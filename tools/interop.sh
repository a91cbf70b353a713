#!/bin/sh
# The tests of the workers' store with the clients of another torch, in an environment of its own (some gigabytes).
#
#   tools/interop.sh '2.6.*'
set -eu
cd "$(dirname "$0")/.."
version=${1:?which torch?}
environment=.venv-torch-$(printf %s "$version" | tr -cd '0-9.')
if [ ! -e "$environment/installed" ]; then
    .venv/bin/python -m venv "$environment"
    "$environment/bin/pip" install --quiet "torch==$version" numpy
    touch "$environment/installed"
fi
ELASTICRS_TORCH_PYTHON=$PWD/$environment/bin/python exec .venv/bin/python -m pytest -m torch tests/store
