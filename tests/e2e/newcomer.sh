#!/usr/bin/env bash
# A newcomer's road: an empty folder, README's and the tutorial's files and commands, nothing else. Then
# the program is broken in the usual ways, and the messages must help.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"

cmake --install "$build" --prefix "$work/prefix" >"$work/log" 2>&1 || die "$(cat "$work/log")"
export CMAKE_PREFIX_PATH=$work/prefix PATH=$work/prefix/bin:$PATH
# As in CI: what a newcomer compiles is not cached away.
tutorial=$repo/docs/tutorial.md
mkdir "$work/train"
cd "$work/train"
fenced "$tutorial" cmake >CMakeLists.txt

# Step 1 compiles, and step 3 runs as the tutorial says.
fenced "$tutorial" "cpp tutorial-start" >train.cpp
[ -s train.cpp ] || die "the tutorial's first program was not found"
cmake -S . -B build -DCMAKE_BUILD_TYPE=Release >"$work/log" 2>&1 || die "$(cat "$work/log")"
cmake --build build >"$work/log" 2>&1 || die "step 1: $(cat "$work/log")"
expect "% right" build/train 1
fenced "$tutorial" "cpp tutorial" >train.cpp
while read -r line; do
  printf '+ %s\n' "$line"
  bash -ec "$line" >"$work/log" 2>&1 </dev/null || die "$line:"$'\n'"$(cat "$work/log")"
done < <(fenced "$tutorial" "sh tutorial")
grep -q 'step 938' "$work/log" || die "lockstep inspect shows no checkpoint of two epochs: $(cat "$work/log")"
[ -s fashion.safetensors ] || die "no weights were saved"

# Broken in three ways, chosen by a variable so that it is compiled once.
sed -e 's|lockstep::DistributedSampler sampler(train->size(), world);|const bool is_forgotten = std::getenv("FORGET_SAMPLER") != nullptr;\
  lockstep::DistributedSampler sampler(train->size(), is_forgotten ? 0 : world.rank(), is_forgotten ? 1 : world.size());|' \
  -e 's|second{128, 10}|second{128, std::getenv("RANK") == std::string(std::getenv("ODD_RANK") ? std::getenv("ODD_RANK") : "none") ? 11 : 10}|' \
  -e 's|checkpoints.on_signal(SIGINT);|if (std::getenv("DIE") != nullptr \&\& world.rank() == 1) std::raise(SIGKILL);|' \
  -i train.cpp
cmake --build build >"$work/log" 2>&1 || die "the broken program: $(cat "$work/log")"
run=(lockstep run -n 2 -- build/train 1)
fresh() { rm -rf runs; }
fresh
expect "they seem to read the same data" env FORGET_SAMPLER=1 "${run[@]}"
fresh
refuse "second.weight" env ODD_RANK=1 "${run[@]}"
fresh
refuse "rank 1 (pid" env DIE=1 "${run[@]}"
refuse "killed by signal 9" env DIE=1 "${run[@]}"
