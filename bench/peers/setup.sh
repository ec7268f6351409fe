#!/usr/bin/env bash
# Makes .venv-peers in the checkout, with DeepSpeed, the tools that build DeepSpeed's operators, and the libraries that the
# codecs of frozen weights are compared with. Only the benchmarks use this environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
sudo=""; [ "$(id -u)" = 0 ] || sudo=sudo
[ -e /usr/include/libaio.h ] || { echo "installing libaio-dev"; $sudo apt-get install -y -qq libaio-dev; }
[ -x .venv-peers/bin/python ] || "${PYTHON:-python3}" -m venv .venv-peers
.venv-peers/bin/pip install -q -c constraints.txt torch transformers psutil ninja setuptools wheel
.venv-peers/bin/pip install -q deepspeed==0.19.8
.venv-peers/bin/pip install -q -c constraints.txt bitsandbytes torchao==0.18.0
# A killed build leaves its lock file, for which every later build would wait forever.
find .venv-peers/torch_extensions -name lock -delete 2>/dev/null || true
echo "peers are ready: .venv-peers"
