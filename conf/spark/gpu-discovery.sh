#!/usr/bin/env bash
# Says which GPUs this machine has, in the form that Spark asks for: {"name": "gpu", "addresses": ["0", "1"]}.
set -euo pipefail
addresses=$(nvidia-smi --query-gpu=index --format=csv,noheader | sed 's/.*/"&"/' | paste -sd, -)
echo "{\"name\": \"gpu\", \"addresses\": [$addresses]}"
