#!/usr/bin/env bash
# Makes the peers' own virtual environment (.venv-peers in the checkout) for bench/step_vs_peers.py:
# plain torch, transformers and DeepSpeed, with DeepSpeed's async_io and cpu_adam ops compiled ahead of the first run.
# Idempotent. PYTHON picks the interpreter the environment is made with (default python3).
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
checkout="$(cd "${here}/../.." && pwd)"
venv="${checkout}/.venv-peers"

# DeepSpeed's async_io op needs libaio's header; without it the op is silently "incompatible".
if ! echo '#include <libaio.h>' | ${CXX:-c++} -E -x c++ - >/dev/null 2>&1; then
  sudo=""
  [ "$(id -u)" -eq 0 ] || sudo="sudo"
  ${sudo} apt-get update
  ${sudo} apt-get install -y libaio-dev
fi

[ -x "${venv}/bin/python" ] || "${PYTHON:-python3}" -m venv "${venv}"
"${venv}/bin/pip" install --quiet --upgrade pip
"${venv}/bin/pip" install --quiet "torch==2.13.0" transformers psutil ninja setuptools wheel
# Its build reads torch's version, so it must see the torch installed above.
DS_BUILD_OPS=0 "${venv}/bin/pip" install --quiet --no-build-isolation "deepspeed==0.19.8"

export TORCH_EXTENSIONS_DIR="${venv}/torch_extensions" DS_ACCELERATOR=cpu PATH="${venv}/bin:${PATH}"
"${venv}/bin/python" - <<'PY'
import deepspeed
import torch
import transformers
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

for builder in (AsyncIOBuilder(), CPUAdamBuilder()):
    builder.load(verbose=False)
    print(f"built {builder.name}")
print(f"torch {torch.__version__}, transformers {transformers.__version__}, deepspeed {deepspeed.__version__}")
PY
