#!/usr/bin/env bash
# What docs/results says of one GPU, stage by stage, from a checkout and without installing vitlab:
#
#   bench/gpu.sh tests OUT       the tests that need a GPU
#   bench/gpu.sh speed OUT       training beside timm and transformers
#   bench/gpu.sh profile OUT     where the time of a training step goes
#   bench/gpu.sh scratch OUT     a plain ViT on CIFAR-10 from scratch; each call trains for at most LIMIT_S and goes on from the last
#   bench/gpu.sh fractals OUT    the same model: fractals, then CIFAR-10, beside CIFAR-10 alone with as many images seen
#
# OUT gets logs and tables; runs lie in RUNS. VITLAB_DATA has the data.
set -euo pipefail
cd "$(dirname "$0")/.."
stage=$1 out=$2 runs=${RUNS:-/tmp/vitlab-runs}
export PYTHONPATH=src PYTHONUNBUFFERED=1
# To be cut off by the limit is no failure (timeout says 124): the run has saved, and the next call goes on.
vitlab() { timeout --signal=TERM "${LIMIT_S:-570}" python3 -m vitlab "$@" || [ $? -eq 124 ]; }
mkdir -p "$out" "$runs"

# The files of a run that a reader wants, under a name of their own.
keep() {
    for file in config.toml metrics.jsonl log.txt; do
        if [ -f "$runs/$1/$file" ]; then cp "$runs/$1/$file" "$out/$1-$file"; fi # a run cut off early has no metrics yet
    done
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
scratch)
    if [ -f "$runs/scratch/config.toml" ]; then
        vitlab train --resume "$runs/scratch" 2>&1 | tee -a "$out/scratch.txt"
    else
        vitlab train cifar10 --recipe cifar10-plain-vit --set "train.epochs=${EPOCHS:-800}" --out "$runs/scratch" 2>&1 | tee "$out/scratch.txt"
    fi
    keep scratch
    ;;
fractals)
    first=${FIRST_EPOCHS:-20} second=${SECOND_EPOCHS:-40} # of 50,000 images each
    plain=(--set data.augment.randaugment=none --set data.mix.mixup=0 --set data.mix.cutmix=0)
    vitlab train "fractals:categories=1000,instances=50,image_size=32,mode=colour" --recipe cifar10-plain-vit "${plain[@]}" \
        --set "train.epochs=$first" --out "$runs/fractals" 2>&1 | tee "$out/fractals.txt"
    vitlab train cifar10 --recipe cifar10-plain-vit --init "$runs/fractals" --set "train.epochs=$second" --out "$runs/after-fractals" \
        2>&1 | tee "$out/after-fractals.txt"
    vitlab train cifar10 --recipe cifar10-plain-vit --set "train.epochs=$((first + second))" --out "$runs/alone" 2>&1 | tee "$out/alone.txt"
    for name in fractals after-fractals alone; do keep "$name"; done
    ;;
*)
    echo "no stage '$stage': tests, speed, profile, scratch or fractals" >&2
    exit 2
    ;;
esac
