# Sourced by the e2e tests: strict mode, a folder of their own that is removed at the end, helpers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
repo=$PWD
build=${1:-$repo/build/release}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The LibTorch that lockstep was built with.
LOCKSTEP_TORCH=$(sed -n 's|^LOCKSTEP_TORCH_ROOT:INTERNAL=||p' "$build/CMakeCache.txt")
export LOCKSTEP_TORCH
# As tests run as root in containers and on few cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
  OMPI_MCA_hwloc_base_binding_policy=none OMP_NUM_THREADS=1

export LOCKSTEP_BENCH_QUICK=1 # benchmarks are shown to run, not measured

die() {
  printf 'FAILED: %s\n' "$*" >&2
  exit 1
}

# expect TEXT COMMAND...: the command succeeds and prints TEXT.
expect() {
  local text=$1 output
  shift
  output=$("$@" 2>&1 </dev/null) || die "'$*' ended with $?:"$'\n'"$output"
  grep -qF -- "$text" <<<"$output" || die "'$*' did not print '$text' but:"$'\n'"$output"
}

# refuse TEXT COMMAND...: the command fails and prints TEXT.
refuse() {
  local text=$1 output
  shift
  output=$("$@" 2>&1 </dev/null) && die "'$*' succeeded:"$'\n'"$output"
  grep -qF -- "$text" <<<"$output" || die "'$*' did not print '$text' but:"$'\n'"$output"
}

# fenced FILE LANGUAGE: the contents of all ```LANGUAGE blocks of a Markdown file.
fenced() {
  awk -v fence="\`\`\`$2" '$0 == fence { inside = 1; next } /^```/ { inside = 0 } inside' "$1"
}

# need_package NAME: of Python's; in CI it must be there. Without it the test ends here.
python=$repo/build/venv/bin/python3
need_package() {
  "$python" -c "import $1" 2>/dev/null && return
  [ "${CI:-}" ] && die "the package $1 is not installed: ./dev test does that"
  echo "without $1 there is nothing to test"
  exit 0
}
