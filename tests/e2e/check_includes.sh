#!/usr/bin/env bash
# Holds every #include of src/ and include/ against the modules' DEPS in CMakeLists.txt:
# a module may include its own headers, those of its DEPS, and the public ones.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
modules=${1:-build/release/modules.txt}
bad=0

complain() {
  printf '%s\n' "$*" >&2
  bad=1
}

while IFS=: read -r module deps; do
  [ -d "src/$module" ] || complain "$modules names '$module', but there is no src/$module"
  while IFS=: read -r file line include; do
    target=$(sed -E 's/.*"([^"]+)".*/\1/' <<<"$include")
    folder=${target%%/*}
    [ "$folder" = "$module" ] || grep -qw -- "$folder" <<<"$deps" ||
      complain "$file:$line: $module may not include \"$target\": $folder is not in its DEPS"
  done < <(grep -rnE '^#include "' "src/$module" || true)
done <"$modules"

for folder in src/*/; do
  grep -q "^$(basename "$folder"):" "$modules" || complain "$folder is not a lockstep_module"
done

# Installed headers see only the standard library, LibTorch and each other.
while IFS=: read -r file line include; do
  case $include in
    '#include <lockstep/'* | '#include <torch/'* | '#include <ATen/'* | '#include <c10/'*) ;;
    '#include <'*/* | '#include "'*) complain "$file:$line: $include in a public header" ;;
  esac
done < <(grep -rnE '^#include' include)

exit $bad
