#!/usr/bin/env bash
# LibTorch programs for one process become distributed in at most five changed lines each.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"

cmake --install "$build" --prefix "$work/prefix" >"$work/log" 2>&1 || die "$(cat "$work/log")"
mkdir "$work/images" "$work/ported"
for file in train-images-idx3 train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do
  gunzip -c "/usr/share/datasets/fashion-mnist/$file-ubyte.gz" >"$work/images/$file-ubyte"
done

# port NAME SED-EXPRESSION...: the program with these changes.
port() {
  local name=$1 changed
  shift
  sed "${@/#/-e}" "$repo/tests/programs/ported/$name.cpp" >"$work/ported/$name.cpp"
  changed=$(diff "$repo/tests/programs/ported/$name.cpp" "$work/ported/$name.cpp" | grep -c '^>') || true
  [ "$changed" -ge 3 ] && [ "$changed" -le 5 ] || die "$name: $changed changed lines"
}
include='s|#include <torch/torch.h>|&\n#include <lockstep/lockstep.h>|'
join='s|  torch::manual_seed(1);|&\n  auto world = lockstep::World::join();|'
sampler='s|samplers::RandomSampler(size)|samplers::DistributedRandomSampler(size, world.size(), world.rank())|'
port mnist "$include" "$join" "$sampler" \
  's|  model.to(device);|&\n  lockstep::DistributedDataParallel ddp(model, world);|'
port dcgan "$include" "$join" "$sampler" \
  's|  auto discriminator = make_discriminator();|&\n  lockstep::DistributedDataParallel ddp_g(generator, world);\n  lockstep::DistributedDataParallel ddp_d(discriminator, world);|'

cat >"$work/ported/CMakeLists.txt" <<'EOF'
cmake_minimum_required(VERSION 3.18)
project(ported CXX)
find_package(lockstep REQUIRED)
foreach(name mnist dcgan)
  add_executable(${name} ${name}.cpp)
  target_link_libraries(${name} PRIVATE lockstep::lockstep)
endforeach()
EOF
export CMAKE_PREFIX_PATH=$work/prefix PATH=$work/prefix/bin:$PATH
cmake -G Ninja -S "$work/ported" -B "$work/build" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 >"$work/log" 2>&1 ||
  die "$(cat "$work/log")"
cmake --build "$work/build" >"$work/log" 2>&1 || die "$(cat "$work/log")"

for name in mnist dcgan; do
  lockstep run -n 2 -- "$work/build/$name" "$work/images" >"$work/out" 2>&1 || die "$name: $(cat "$work/out")"
  [ "$(grep -c ' parameters ' "$work/out")" -eq 2 ] || die "$name did not end on two ranks: $(cat "$work/out")"
  [ "$(sed -n 's/.* parameters //p' "$work/out" | sort -u | wc -l)" -eq 1 ] || die "$name: replicas differ: $(cat "$work/out")"
  grep -q nan "$work/out" && die "$name: $(cat "$work/out")"
done
lockstep run -n 2 -- "$work/build/mnist" "$work/images" | awk '/accuracy/ { if ($NF < 0.5) exit 1; seen = 1 } END { exit !seen }' ||
  die "mnist did not learn"
