#!/usr/bin/env bash
# The script's own behaviour: help, unknown verbs, and set-up without root.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"

for verb in setup build demo test verify bench docs check format; do
  expect "./dev $verb" ./dev
done
refuse "there is no verb 'tset'" ./dev tset

# On a machine without the packages, an ordinary user is told the one command that is missing.
mkdir "$work/bin"
printf '#!/bin/sh\nexit 1\n' >"$work/bin/dpkg-query"
printf '#!/bin/sh\n[ "$1" = -u ] && echo 1000\n' >"$work/bin/id"
printf '#!/bin/sh\nexit 1\n' >"$work/bin/sudo"
chmod +x "$work"/bin/*
refuse "please run this once, as root: apt-get update && apt-get install -y g++ cmake" env PATH="$work/bin:$PATH" ./dev setup

# An interrupted installation of PyTorch is made anew: without its stamp, the folder does not count.
mkdir -p "$work/clone/build/venv/bin"
cp dev "$work/clone/dev"
cat >"$work/bin/python3" <<EOF
#!/bin/sh
echo "python3 \$*" >>$work/calls
mkdir -p "\$3/bin"
printf '#!/bin/sh\nexit 0\n' >"\$3/bin/pip"
chmod +x "\$3/bin/pip"
EOF
printf '#!/bin/sh\necho installed\n' >"$work/bin/dpkg-query"
chmod +x "$work"/bin/*
setup=(env -u LOCKSTEP_TORCH -u CMAKE_PREFIX_PATH PATH="$work/bin:$PATH" "$work/clone/dev" setup)
expect "installing torch==2.13.0" "${setup[@]}"
expect "ready" "${setup[@]}"
[ "$(wc -l <"$work/calls")" -eq 1 ] || die "a second set-up did not find the first"

# ./dev build installs nothing, and says what is missing.
printf '#!/bin/sh\nexit 1\n' >"$work/bin/dpkg-query"
refuse "Run ./dev setup once" env -u LOCKSTEP_TORCH PATH="$work/bin:$PATH" "$work/clone/dev" build

# The docs' tables: every name is known, and rows replace what was there.
cp docs/benchmarks.md docs/scaling.md README.md "$work"
echo '{"bench": "gpt", "what": "ms per step, median", "lockstep": 120, "python": 180, "ratio": 1.5}' >"$work/rows"
cat >>"$work/rows" <<'EOF'
{"bench": "memory", "model": "gpt", "peer": "bare", "ranks": 2, "above_bare_mb": null, "x_formula": null, "x_replicated": null, "is_replicated_measured": false, "ms_per_step": null, "x_barrier": null}
{"bench": "memory", "model": "gpt", "peer": "lockstep", "ranks": 2, "above_bare_mb": null, "x_formula": null, "x_replicated": null, "is_replicated_measured": false, "ms_per_step": null, "x_barrier": null, "no_room": "does not fit"}
{"bench": "memory", "model": "gpt", "peer": "python_zero", "ranks": 2, "above_bare_mb": 270.2, "x_formula": 1.043, "x_replicated": 0.782, "is_replicated_measured": false, "ms_per_step": 600, "x_barrier": 1.2}
EOF
python3 bench/tables.py "$work/rows" "$work"/*.md
grep -qF '| median | 120 | 180 | 1.50 x |' "$work/benchmarks.md" || die "the row is not in its table"
for row in 'does not fit | 270' ' | 1.04' ' | ~0.78' ' | 600 (1.20)'; do
  grep -qF "| GPT, 10.8 M | 2 | $row |" "$work/benchmarks.md" || die "there is no row of a host's memory with $row"
done
[ "$(grep -c '^<!-- end -->$' "$work/benchmarks.md")" -eq "$(grep -c '^<!-- end -->$' docs/benchmarks.md)" ] || die "a table is gone"
echo '<!-- bench nothing -->
<!-- end -->' >"$work/other.md"
refuse "there is no table 'nothing'" python3 bench/tables.py "$work/rows" "$work/other.md"
