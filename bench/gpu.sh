#!/usr/bin/env bash
# What docs/results says of one GPU, stage by stage, from a checkout and without installing vitlab:
#
#   bench/gpu.sh tests OUT       the tests that need a GPU
#   bench/gpu.sh speed OUT       training beside timm and transformers
#   bench/gpu.sh profile OUT     where the time of a training step goes
#   bench/gpu.sh attention OUT   torch's attention kernels and the formula itself
#   bench/gpu.sh scratch OUT     a plain ViT on CIFAR-10 from scratch
#   bench/gpu.sh tune OUT        with Muon: more width, patch dropout, smaller patches, 64 pixels at the end, each for GPU_S seconds, judged by a
#                                tenth of the training images
#   bench/gpu.sh seeds OUT       what `tune` chose, on all training images, with SEEDS at once, each for GPU_S seconds of a GPU of its own
#   bench/gpu.sh tiny OUT        the same model on Tiny-ImageNet from scratch; SEEDS
#   bench/gpu.sh fractals OUT    the same model: fractals, then CIFAR-10, beside CIFAR-10 alone with as many images seen
#   bench/gpu.sh specialised OUT axial attention and non-local blocks beside their multiply-adds
#   bench/gpu.sh distil OUT      the start weights that come with vitlab
#   bench/gpu.sh start OUT       these weights and their teacher on Pets and hymenoptera, beside training on Pets from scratch
#   bench/gpu.sh masked OUT      masked patch prediction and MAE on CIFAR-10, then labels, beside labels alone; SEEDS
#   bench/gpu.sh student OUT     Noisy Student on CIFAR-10 with 4,000 labels; SEEDS
#   bench/gpu.sh studies OUT     the studies at the scale of one GPU, those of STUDIES or all; what docs/results has is not run again
#
# Stages of different runs may run at once: a GPU that small models leave half idle finishes sooner, most of all under NVIDIA's MPS.
# OUT gets logs and tables; runs lie in RUNS. VITLAB_DATA has the data, and DINOv2's weights. Stages that train do so for at most
# LIMIT_S seconds in all, and called again they resume.
set -euo pipefail
cd "$(dirname "$0")/.."
stage=$1 out=$2 runs=${RUNS:-/tmp/vitlab-runs}
dinov2=${VITLAB_DATA:-../shared/data}/dinov2_vits14/dinov2_vits14_fp16.safetensors
export PYTHONPATH=src PYTHONUNBUFFERED=1
mkdir -p "$out" "$runs"

# `go NAME ...` trains, resumes, or does nothing where the run has ended; its files for readers go to OUT. To be cut off by the
# limit (timeout says 124) is not a failure, but ends the stage: the run has saved.
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
        echo "cut off after ${LIMIT_S:-570} s: call again to resume"
        exit 0
    fi
    return "$code"
}

# `cifar NAME SHARE IMAGES ...` trains a ViT on CIFAR-10 with Muon for $GPU_S seconds of a GPU that it would have for itself; of these, where
# SHARE is below 100, the last ones at 64 pixels and half the rate. IMAGES are those of an epoch. MORE are options of a trial.
muon="--recipe cifar10-plain-vit --set optim.name=muon --set optim.momentum=0.95 --set optim.nesterov=true --set optim.weight_decay=0.2"
at_64="--set data.image_size=64 --set data.augment.shift_px=8 --set optim.lr=1e-3 --set keep_head=true"
cifar() {
    local name=$1 share=$2 images=$3
    shift 3
    local long short
    long=$(epochs "${name##*.}" "$share" "$images")
    # shellcheck disable=SC2086 # options are words
    go "$name" $muon --set optim.lr=2e-3 --set train.epochs="$long" "$@" ${MORE:-}
    if [ "$share" -lt 100 ]; then
        short=$(epochs "${name##*.}-64" "$((100 - share))" "$images")
        # shellcheck disable=SC2086
        go "$name-64" $muon $at_64 --set train.epochs="$short" --init "$runs/$name" "$@" ${MORE:-}
    fi
}

# How many epochs a candidate passes in its share of the time, by the rates that `tune` has measured.
epochs() {
    awk -v name="$1" -v share="$2" -v images="$3" -v seconds="${GPU_S:-240}" \
        '$1 == name { found = 1; printf "%d", $2 * seconds * share / 100 / images } END { exit !found }' "$runs/rates"
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
tune)
    # All candidates at once: each compiles and tests while others train. First their images per second beside each other, times their
    # number; then all for the same time of a GPU. The best by a tenth of the training images is written to $runs/tuned, for `seeds`.
    held="--set data.val_frac=0.1"
    cat >"$runs/candidates" <<END
base 65
wide 100 --set model.name=ViT-w384d9m1536h6/4
wide-patches-50 100 --set model.name=ViT-w384d9m1536h6/4 --set model.patch_dropout=0.5
patch-2 100 --set model.name=ViT-w192d9m768h3/2
END
    if [ ! -f "$runs/rates" ]; then
        while read -r name share options; do
            # shellcheck disable=SC2086 # options are words
            {
                timeout "${PROBE_S:-120}" python3 -m vitlab train $muon $held $options --out "$runs/rate.$name" ${MORE:-} >"$out/rate-$name.txt" 2>&1 &
                if [ "$share" -lt 100 ]; then
                    timeout "${PROBE_S:-120}" python3 -m vitlab train $muon $held $options --set data.image_size=64 --out "$runs/rate.$name-64" ${MORE:-} >"$out/rate-$name-64.txt" 2>&1 &
                fi
            } </dev/null
        done <"$runs/candidates"
        wait
        python3 - "$runs" <<'END' | tee "$out/rates.txt"
import json, pathlib, sys
runs = sorted(pathlib.Path(sys.argv[1]).glob("rate.*"))
for run in runs:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    later = steps[len(steps) // 2 :]  # compiled by then
    print(run.name.partition(".")[2], round(len(runs) * len(later) / sum(1 / step["images_per_second"] for step in later)))
END
        cp "$out/rates.txt" "$runs/rates"
    fi
    while read -r name share options; do
        # shellcheck disable=SC2086
        cifar "tune.$name" "$share" 45000 $held $options </dev/null &
    done <"$runs/candidates"
    wait
    while read -r name share options; do
        run=$runs/tune.$name
        if [ "$share" -lt 100 ]; then run+=-64; fi # what comes before is half a candidate
        if [ -f "$run/report.html" ]; then         # one that was cut off has another schedule behind it
            last=$(find "$run/checkpoints" -name progress.json | sort | tail -n 1)
            echo "$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["evaluations"][-1]["top1"])' "$last") $name"
        fi
    done <"$runs/candidates" | sort -rn | tee "$out/tuned.txt"
    best=$(head -n 1 "$out/tuned.txt" | cut -d ' ' -f 2)
    grep "^$best " "$runs/candidates" >"$runs/tuned"
    ;;
seeds)
    read -r name share set <"$runs/tuned" # what `tune` chose; without it this ends here
    pids=()
    for seed in ${SEEDS:-0 1 2}; do
        # shellcheck disable=SC2086 # options are words
        cifar "seed-$seed.$name" "$share" 50000 $set --seed "$seed" </dev/null &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid"; done # a seed that failed fails the stage
    ;;
tiny)
    for seed in ${SEEDS:-0 1 2}; do
        go "tiny-$seed" --recipe tiny-imagenet-plain-vit --seed "$seed" &
    done
    wait
    ;;
fractals)
    go fractals --recipe fractals-plain-vit
    go after-fractals --recipe cifar10-after-fractals --init "$runs/fractals"
    go alone --recipe cifar10-plain-vit --set train.epochs=300
    ;;
specialised)
    python3 bench/attention.py --device cuda --write "$out/specialised-attention-h200.md"
    ;;
distil)
    go distil --recipe distil-vit-ti16-dinov2 --set teacher="$dinov2"
    ;;
start)
    for data in oxford-pets hymenoptera; do
        for model in ViT-Ti/16@dinov2-distilled "$dinov2"; do
            python3 -m vitlab evaluate "$model" "$data" --knn --probe --json -q >"$out/$data-$(basename "$model").json"
        done
    done
    go pets-scratch oxford-pets --init scratch --model ViT-Ti/16 --image-size 224 --epochs 200 --batch-size 256 --lr 1e-3 \
        --set optim.weight_decay=0.05 --set data.cache=device --set data.crop.how=inception --set 'data.crop.area=[0.2,1.0]' \
        --set data.resize=shorter-side --set data.crop_frac=0.875 --set data.augment.randaugment=torchvision \
        --set data.mix.mixup=0.2 --set train.precision=bf16 --set train.compiled=true --set 'schedule.warmup="10 %"' \
        --set data.val_frac=0 --set model.stochastic_depth=0.1
    ;;
masked)
    for seed in ${SEEDS:-0 1 2}; do
        go "masked-$seed" --recipe cifar10-masked-patches --seed "$seed"
        go "after-masked-$seed" --recipe cifar10-after-masked-patches --seed "$seed" --init "$runs/masked-$seed"
        go "mae-$seed" --recipe cifar10-mae --seed "$seed"
        go "after-mae-$seed" --recipe cifar10-after-mae --seed "$seed" --init "$runs/mae-$seed"
        go "short-$seed" --recipe cifar10-plain-vit-short --seed "$seed"
    done
    ;;
student)
    for seed in ${SEEDS:-0 1 2}; do
        run=$runs/student-$seed
        if [ -f "$run/noisy_student.json" ]; then set -- --resume "$run"; else set -- --recipe noisy-student-cifar10 --seed "$seed" --out "$run"; fi
        if [ ! -f "$run/report.html" ]; then
            timeout --signal=TERM "$((${LIMIT_S:-570} - SECONDS))" python3 -m vitlab noisy-student "$@" 2>&1 | tee -a "$out/student-$seed.txt" || exit 0
        fi
        cp "$run/noisy_student.json" "$out/student-$seed.json"
    done
    ;;
studies)
    shopt -s extglob
    all=$(python3 -c 'from vitlab.studies.study_file import list_study_names; print(*list_study_names())')
    mkdir -p "$runs/studies/records"
    cp -rn docs/results/records/cells "$runs/studies/records/" 2>/dev/null || true
    pack() { tar -C "$runs/studies" -czf "$out/cells.part" records && mv "$out/cells.part" "$out/cells.tgz"; }
    while sleep 60; do pack; done & # a machine that is lost, or a stage that is killed, costs a minute
    packing=$!
    # shellcheck disable=SC2086 # names of studies are words
    # What is timed would make all others wait for a device of its own: name `speed attention-cost` in a call of theirs.
    timeout --signal=TERM "${LIMIT_S:-570}" python3 -m vitlab study run ${STUDIES:-${all//@(speed|attention-cost)/}} --scale gpu --out "$runs/studies" ${WORKERS:+--workers "$WORKERS"} \
        2>&1 | tee -a "$out/studies.txt" || true
    kill "$packing"
    pack
    ;;
*)
    echo "no stage '$stage'; they are named at the top of this file" >&2
    exit 2
    ;;
esac
