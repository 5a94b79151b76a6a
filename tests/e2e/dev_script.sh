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
