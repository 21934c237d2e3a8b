#!/usr/bin/env bash
# What docs/results says of one GPU, stage by stage, from a checkout and without installing vitlab:
#
#   bench/gpu.sh tests OUT       the tests that need a GPU
#   bench/gpu.sh speed OUT       training beside timm and transformers
#   bench/gpu.sh profile OUT     where the time of a training step goes
#   bench/gpu.sh attention OUT   torch's attention kernels and the formula itself
#   bench/gpu.sh scratch OUT     a plain ViT on CIFAR-10 from scratch
#   bench/gpu.sh fractals OUT    the same model: fractals, then CIFAR-10, beside CIFAR-10 alone with as many images seen
#
# OUT gets logs and tables; runs lie in RUNS. VITLAB_DATA has the data. The last two train for at most LIMIT_S seconds in all,
# and called again they go on where they were.
set -euo pipefail
cd "$(dirname "$0")/.."
stage=$1 out=$2 runs=${RUNS:-/tmp/vitlab-runs}
export PYTHONPATH=src PYTHONUNBUFFERED=1
mkdir -p "$out" "$runs"

# `go NAME ...` trains, goes on, or does nothing where the run has ended; its files for readers go to OUT. To be cut off by the
# limit (timeout says 124) is no failure, but ends the stage: the run has saved.
go() {
    local name=$1 left=$((${LIMIT_S:-570} - SECONDS)) code=0
    shift
    if [ ! -f "$runs/$name/report.html" ]; then
        if [ -f "$runs/$name/config.toml" ]; then set -- --resume "$runs/$name"; else set -- "$@" --out "$runs/$name"; fi
        timeout --signal=TERM "$((left > 1 ? left : 1))" python3 -m vitlab train "$@" 2>&1 | tee -a "$out/$name.txt" || code=$?
    fi
    for file in config.toml metrics.csv log.txt; do
        if [ -f "$runs/$name/$file" ]; then cp "$runs/$name/$file" "$out/$name-$file"; fi # a run cut off early has no metrics yet
    done
    if [ "$code" -eq 124 ]; then
        echo "cut off after ${LIMIT_S:-570} s: call again to go on"
        exit 0
    fi
    return "$code"
}

case $stage in
tests)
    python3 -m pytest -q -p no:cacheprovider tests/gpu --durations=10 2>&1 | tee "$out/gpu-tests.txt"
    ;;
speed)
    python3 bench/training.py --device cuda --rounds 3 --steps 20 --seconds 2 --write "$out/train-speed.md"
    ;;
profile)
    python3 bench/step_profile.py --recipe cifar10-plain-vit --write "$out/step-profile.txt"
    ;;
attention)
    python3 bench/gpu_attention.py --write "$out/gpu-attention.md"
    ;;
scratch)
    go scratch --recipe cifar10-plain-vit-long
    ;;
fractals)
    go fractals --recipe fractals-plain-vit
    go after-fractals --recipe cifar10-after-fractals --init "$runs/fractals"
    go alone --recipe cifar10-plain-vit --set train.epochs=300
    ;;
*)
    echo "no stage '$stage': tests, speed, profile, attention, scratch or fractals" >&2
    exit 2
    ;;
esac
