#!/usr/bin/env bash
# Measure the numbers of the docs that need a GPU, part by part; minutes on an H200 in brackets.
#
#   bash lab/gpu.sh                     # all of them, one after another
#   CUDA_VISIBLE_DEVICES=1 COMMIT=abc1234 bash lab/gpu.sh sdxl merging
#
# Results go to lab/results. An interrupted part resumes from its files in out/. COMMIT names the commit if git cannot
# tell it.
set -u
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} # parts may run side by side
commit=(--commit "${COMMIT:-}")
results=(--out lab/results "${commit[@]}")
foveate=${FOVEATE:-foveate}
lab="python3 -m lab"

timed() { echo "== $(date +%T) $*" && "$@"; }
step() { timed $foveate bench step --model "$1" --size "$2" "${results[@]}" "${@:3}"; }
profile() { timed $lab step-profile --model "$1" --sides "$2" "${results[@]}" "${@:3}"; }

tests() { # [5; needs beartype; skips extras of Foveate that are not installed, and JAX on the GPU, which would take all memory]
  JAX_PLATFORMS=cpu timed python3 -m pytest -p no:benchmark -n 8 -m gpu -rf --tb=short --show-capture=no \
    --continue-on-collection-errors -W "ignore:os.fork" tests
}

attention() { # [5, estimated; with flash-attn-4 installed, beside it]
  timed $lab attention --pixels 1024,2048,4096 --centre 0.25 "${results[@]}"
  timed $lab attention --pixels 1024,2048 --centre 0.25 --backward "${results[@]}"
}

# [8, estimated; with flash-attn-4 installed: tables of whole blocks of 128 tokens, and tables whose text is no whole number
# of blocks. Then log-linear attention with the heads of FLUX.1]
peers() {
  local which options how
  for which in whole-blocks other-blocks; do
    options=(--tiles 4,16 --centre 0.25 --align 128)
    [ $which = whole-blocks ] || options=(--tiles 16 --centre 0.25 --text 300)
    for how in forward backward; do
      timed $lab attention --pixels 1024,2048 "${options[@]}" $([ $how = forward ] || echo --backward) "${commit[@]}" \
        --out "out/$which"
      mv "out/$which/attention-$how-cuda.json" "lab/results/attention-$how-$which-cuda.json"
    done
  done
  timed $lab attention --pixels 4096 --tiles 16 --centre 0.25 --align 128 "${commit[@]}" --out out/whole-blocks
  mv out/whole-blocks/attention-forward-cuda.json lab/results/attention-forward-whole-blocks-4096px-cuda.json
  timed $lab attention --pixels 1024,2048 --tiles 16 --centre 0.25 --text 300 --head-dim 64 "${commit[@]}" --out out/heads-of-64
  mv out/heads-of-64/attention-forward-cuda.json lab/results/attention-forward-heads-of-64-cuda.json
  timed $lab log-linear --tokens 4096,16384 --heads 24 --head-dim 128 --top-k 8,16,32 "${commit[@]}" --out out/images
  mv out/images/log-linear-forward-cuda.json lab/results/log-linear-forward-images-cuda.json
  timed python3 -m lab.bench.text_and_image lab/results/log-linear-joint-cuda.json "${commit[@]}"
}

calls() { # [6]
  timed $lab calls "${results[@]}"
  timed python3 -m lab.bench.launches lab/results/launches-cuda.json
}

log_linear() { # [8]
  timed $lab log-linear --head-dim 64,128 "${results[@]}"
  timed $lab log-linear --backward "${results[@]}"
  # a separate folder, because the files have the same names
  timed $lab log-linear --heads 8 --levels auto,2,3 --top-k 8,16 --inputs balanced,skewed --longest 0.1 \
    "${results[@]}" --out lab/results/log-linear-options
}

train() { timed $lab train --compile "${results[@]}"; } # [4]

# [16, estimated: exact (one tile), HilbertA, LLSA and ToMA, compiled and eager, on one card; 4096 px for some of them]
flux() {
  local methods=() method
  for method in hilberta:tiles={1,4,16} hilberta:tiles={4,16},slide=curve hilberta:tiles=16+toma:keep=0.5 \
    llsa:top_k=16 llsa:block_size=64 llsa:top_k=4,block_size=64 toma:keep={0.75,0.5,0.25}; do
    methods+=(--method "$method")
  done
  step flux-dev 1024,2048 --rounds 5 "${methods[@]}" --compile
  step flux-dev 1024,2048 --rounds 5 "${methods[@]}"
  methods=()
  for method in hilberta:tiles={1,4,16} hilberta:tiles=16+toma:keep=0.5 llsa:block_size=64 toma:keep=0.5; do
    methods+=(--method "$method")
  done
  step flux-dev 4096 --rounds 3 "${methods[@]}" --compile --out out/4096px
  mv out/4096px/step-flux-dev-compiled-cuda.json lab/results/step-flux-dev-4096px-compiled-cuda.json
}

flux_options() { # [4]
  local methods=() method
  for method in todo tomesd tofu toma:keep={0.75,0.5,0.25} toma:dst_every=1,weights_every=1 toma:dst_every=50,weights_every=50 \
    toma:granularity=module "toma:granularity=module,tile=(4,4)" "toma:tile=(4,4)" "toma:tile=(16,16)"; do
    methods+=(--method "$method")
  done
  step flux-dev 1024 --compile --rounds 5 "${methods[@]}" --out out/options
  mv out/options/step-flux-dev-compiled-cuda.json lab/results/step-flux-dev-options-cuda.json
}

sdxl() { # [7]
  local methods=() keep
  for keep in 0.75 0.5 0.25; do methods+=(--method "toma:keep=$keep"); done
  methods+=(--method toma:granularity=module --method tomesd --method tofu --method todo)
  step sdxl 1024,2048 --compile "${methods[@]}"
  step sdxl 1024,2048 "${methods[@]}"
  profile sdxl 64,128 "${methods[@]}"
}

minimax_h3() { step minimax-h3 1280x736 --frames 124 --rounds 1 --num-layers 20; } # [4]

compiled() { # [6, estimated: eager steps beside compiled blocks and blocks as CUDA graphs]
  local model how
  for model in flux-dev sdxl; do
    for how in "" --compile --cuda-graphs; do
      step "$model" 1024 --rounds 5 --method toma:keep=0.5 --method hilberta:tiles=1 --method hilberta:tiles=16 $how --out "out/modes"
    done
  done
}

# on 2, 4 and 8 GPUs, or on as many as `counts` says, as far as there are so many
on_each() {
  local gpus
  for gpus in ${counts:-2 4 8}; do
    (($(nvidia-smi --list-gpus | wc -l) < gpus)) ||
      timed torchrun --standalone --nproc-per-node $gpus -m "$1" lab/results "${@:2}" "${commit[@]}"
  done
}

parallel() { # [12 on two GPUs, estimated]
  on_each lab.bench.parallel --model flux-dev --grid 128x128 --eager
  on_each lab.bench.parallel --model flux-dev --grid 128x128
  on_each lab.bench.parallel --model wan-14b --grid 21x45x80 --rounds 2
  on_each lab.bench.parallel --model minimax-h3 --grid 37x23x40 --layers 20 --rounds 2
}

# [6 on two GPUs: FLUX.1-dev distilled with sharded weights, and a pixel model of 262,144 tokens]
parallel_training() {
  local counts=${counts:-1 2 4 8} # one first: the others are compared with it
  on_each lab.bench.parallel_training --model flux-dev --pixels 1024
  on_each lab.bench.parallel_training --model DiT-S --pixels 512 --compile
}

replicas() { # [5 on two GPUs, estimated; with Ray installed]
  local gpus
  gpus=$(nvidia-smi --list-gpus | wc -l)
  timed python3 -m lab.bench.replicas lab/results/replicas-cuda.json --replicas "$(seq -s, 1 "$gpus")" "${commit[@]}"
}

divided() { on_each lab.bench.divided_context; } # [6 on two GPUs, estimated: contexts of a language model over several GPUs]

built_in() { # [2]
  step built-in 256,512 --text-tokens 64
  step built-in 256,512 --text-tokens 64 --compile
}

quality() { # [8]
  timed python3 -m lab.quality.quality --size 256 --prompts 500 --batch 32 --pictures out/quality "${commit[@]}"
  timed python3 -m lab.quality.quality --size 512 --prompts 128 --batch 8 --pictures out/quality "${commit[@]}"
}

merging() { # [8]
  timed python3 -m lab.quality.options merging --size 256 --prompts 500 --batch 32 --pictures out/options "${commit[@]}"
}

sparse() { # [24]
  timed python3 -m lab.quality.options sparse --size 256 --prompts 500 --batch 32 --pictures out/options "${commit[@]}"
  timed python3 -m lab.quality.options sparse --size 512 --prompts 128 --batch 8 --pictures out/options "${commit[@]}"
}

blocks() { # [8, estimated: blocks of 16, 32 and 64 tokens at equal keys, and with dense first steps]
  timed python3 -m lab.quality.options blocks --size 512 --prompts 128 --batch 8 --pictures out/options "${commit[@]}"
  timed python3 -m lab.quality.options blocks --size 256 --prompts 500 --batch 32 --pictures out/options "${commit[@]}"
}

recommended() { # [12, estimated: the recommended settings on captions, and on photographs by image to image; resumes]
  timed python3 -m lab.quality.recommended captions --size 256 --prompts 500 --batch 32 --pictures out/recommended "${commit[@]}"
  timed python3 -m lab.quality.recommended captions --size 512 --prompts 128 --batch 8 --pictures out/recommended "${commit[@]}"
  timed python3 -m lab.quality.recommended photographs --size 256 --pictures out/recommended "${commit[@]}"
  timed python3 -m lab.quality.recommended photographs --size 512 --pictures out/recommended "${commit[@]}"
}

joint() { # [9: a step cache, methods and both at equal error; interrupted, it goes on where it was]
  timed python3 -m lab.quality.joint --size 512 --batch 8 --search 8 --prompts 64 --pictures out/joint "${commit[@]}"
  timed python3 -m lab.quality.joint --size 256 --batch 16 --search 16 --prompts 128 --pictures out/joint "${commit[@]}"
  timed python3 -m lab.bench.cached_run lab/results --method toma:keep=0.85 --cache-computed 0.4 --computed 0.4 "${commit[@]}"
}

over_steps() { # [6: schedules against one setting, and resolution over steps against ToMA; resumes]
  timed python3 -m lab.quality.over_steps --size 512 --batch 8 --search 8 --prompts 24 --pictures out/over-steps "${commit[@]}"
  timed python3 -m lab.quality.over_steps --model built-in-video --size 96 --batch 8 --search 8 --prompts 16 \
    --pictures out/over-steps "${commit[@]}"
}

distilled() { # [7 a variant]
  timed python3 -m lab.quality.distilled --out out/distilled --only "${ONLY:-t16,t4-rank32}" --steps 3000 --compile "${commit[@]}"
}

distilled_512() { # [9 a variant; starts from the LoRAs of distilled]
  local name start
  for name in $(tr , ' ' <<<"${ONLY:-t16,t4-rank32}"); do
    start=out/$name-3000-steps.safetensors
    cp "out/distilled/$name-3000-steps/pytorch_lora_weights.safetensors" "$start"
    timed python3 -m lab.quality.distilled --out out/distilled-512 --only "$name" --start "$start" --size 512 --pictures 400 \
      --steps 400 --rate 5e-4 --at-once 8 --batch 8 --prompts 128 --compile "${commit[@]}"
  done
}

ablations() { # [25]
  timed python3 -m lab.quality.distilled --out out/distilled --steps 500 --compile "${commit[@]}" \
    --only "${ONLY:-t16,t16-paper,t16-uniform,t16-rank4,t16-rank16,t16-still,t16-bare,t16-moore,t16-raster,clear}"
}

slide() { # [10, estimated: tiles that slide diagonally over the image against tiles that slide along the curve]
  timed python3 -m lab.quality.distilled --out out/slide --steps 500 --compile "${commit[@]}" \
    --only "${ONLY:-t16,t16-diagonal,t4,t4-diagonal}"
}

pixel_dit() { # [15 at 64 px, 23 at 128 px, estimated; SIZE=64 runs one of them]
  local size
  for size in ${SIZE:-64 128}; do
    timed python3 -m lab.quality.pixel_dit --size "$size" --before 1000 --steps $((64000 / size)) --batch $((1024 / size)) \
      --optimizer muon --rate 2e-3 --average 0.995 --prompts 100 --compile --out "out/pixel_dit-$size" "${commit[@]}"
  done
}

pixel_model() { # [19; the model that is shipped]
  timed $foveate train --dit DiT-XS --size 32,64,128 --steps 4500,2200,3500 --batch 128,32,8 --at-once 128 --optimizer muon --rate 2e-3 \
    --cool-down 0.25 --average 0.998 --compile --sample-every 2500 --out out/pixel
  timed python3 -m lab.quality.quality --model out/pixel --guidance 3 --size 128 --prompts 100 --batch 50 --pictures out/pixel-quality \
    "${commit[@]}"
}

video() { # [25 with GPUS=2: 10 for the autoencoder; the model that is shipped]
  timed python3 -m torch.distributed.run --standalone --nproc-per-node "${GPUS:-1}" -m lab video --compile \
    --sample-every 2000 --out out/video
}

video_lora() { # [13: a LoRA for HilbertA, and the scores of all methods with it and without]
  mkdir -p out
  python3 -c "from itertools import islice; from lab.training.moving import moving_scenes
for moving in islice(moving_scenes(1), 400): print(moving.scene.caption)" >out/video-captions.txt
  timed $foveate distill --model built-in-video --size 96 --guidance 3 --draw-steps 20 --tiles 4 \
    --prompts out/video-captions.txt --optimizer adamw --rate 1e-3 --rank 32 --layers all --noise-levels shifted --cool-down 1 \
    --at-once 32 --steps 600 --compile --out out/video-lora
  timed python3 -m lab.quality.video --lora out/video-lora --batch 40 --pictures out/video-judged "${commit[@]}"
}

prefill() { timed $lab context "${results[@]}"; } # [4]

# [8, estimated; targets: 16 questions at 4x the tokens a second of one by one, and of prefill: the first token at 32,768
# tokens 5.2x sooner than the full prefill, composing at 80 % of the speed of copying]
questions() {
  timed $foveate bench context --model llama-8b --context-tokens 8192 --chunk 2048 --max-new-tokens 64 --questions 32 "${results[@]}"
  timed $foveate bench context --model llama-8b --context-tokens 32768 --chunk 2048 --max-new-tokens 64 --questions 16 "${results[@]}" \
    --out out/questions
  mv out/questions/questions-llama-8b-cuda.json lab/results/questions-llama-8b-32768-cuda.json
}

pools() { timed $lab examples "${results[@]}"; } # [2; apricot-select, if installed, 1 more]

examples() { # [12]
  timed python3 -m lab.quality.examples --reader learner --out out/examples "${commit[@]}"
}

readers() { # [3 on three GPUs, one seed each; GPUS=1 trains all three on one in 6]
  local seed
  mkdir -p out/readers
  for seed in 0 1 2; do
    CUDA_VISIBLE_DEVICES=$((seed % ${GPUS:-3})) timed $lab reader --out "out/readers/$seed" --seed "$seed" \
      >"out/readers/$seed.log" 2>&1 &
  done
  wait
  tail -n 12 out/readers/*.log
}

recomputed() { # [5]
  timed python3 -m lab.quality.context --out out/context "${commit[@]}" \
    --readers out/readers/0/reader,out/readers/1/reader,out/readers/2/reader
}

# [80, estimated; the packages of lab/quality/pretrained_models.py. First the seconds of each method, which need a GPU of their
# own, then their quality, which resumes; both at 2,048 tokens and more]
pretrained() {
  local some=(--device cuda "${commit[@]}")
  timed $lab pretrained --dtype bfloat16 --no-variants --tokens 7936 --texts 6 --runs 2 --out out/pretrained-times "${some[@]}"
  mv lab/results/pretrained-cuda.json lab/results/pretrained-times-cuda.json
  timed $lab pretrained "${some[@]}"
  timed $lab pretrained --budgets 0.05,0.1,0.2,0.3 --no-variants "${some[@]}"
  timed $lab pretrained --tokens 7936 --texts 40 --no-variants "${some[@]}"
  timed $lab pretrained --tokens 15872 --texts 20 --no-variants --models gemma-3-270m "${some[@]}"
}

pretrained_examples() { # [10, estimated: Sub-CP with the same models; resumes]
  timed python3 -m lab.quality.pretrained_examples --device cuda --dtype bfloat16 "${commit[@]}"
}

parts=(
  tests attention peers calls log_linear train flux flux_options sdxl minimax_h3 compiled parallel
  parallel_training divided replicas
  built_in quality recommended joint over_steps merging sparse blocks distilled
  distilled_512 ablations slide
  pixel_dit pixel_model video video_lora prefill questions pools examples readers recomputed
  pretrained pretrained_examples
)
for part in "${@:-${parts[@]}}"; do
  [[ " ${parts[*]} " == *" $part "* ]] || { echo "unknown part $part: choose from ${parts[*]}" && exit 2; }
done
for part in "${@:-${parts[@]}}"; do "$part" || echo "== $part failed"; done
echo "== $(date +%T) done"
