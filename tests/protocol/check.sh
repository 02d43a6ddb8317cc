#!/bin/sh
# Model-checks the fused tail's protocol with spin; see docs/protocol.md. Needs spin and a C compiler.
# Every variant that is right must be proven, and every one that is broken on purpose must be caught.
set -eu
model=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)/tail.pml
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# verdict OPTIONS...: "holds" or "fails", or stops the script if the search was not exhaustive.
verdict() {
  spin "$@" -a "$model" >/dev/null
  ${CC:-cc} -O2 -w -DSAFETY -DCOLLAPSE -DMEMLIM=6000 -o pan pan.c
  ./pan -m1000000 >log
  if grep -q 'errors: [1-9]' log; then
    echo fails
  elif grep -q 'errors: 0' log && ! grep -qi 'search not completed\|max search depth too small' log; then
    echo holds
  else
    cat log >&2
    exit 2
  fi
}

expect() {
  wanted=$1
  shift
  got=$(verdict "$@")
  states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' log)
  echo "$got: $* ($states states)"
  test "$got" = "$wanted"
}

for layers in 1 2 3 4 5 6 7 8; do
  expect holds -DTOKENS=1 -DSTEPS=2 -DLAYERS=$layers
done
expect holds -DLAYERS=5 -DSTEPS=1
expect holds -DLAYERS=5 -DSTEPS=1 -DTWO_SHOT
expect holds -DRANKS=3 -DLAYERS=4 -DSTEPS=1 -DTOKENS=1 -DSCATTERED -DONE_FAR
expect holds -DMORTAL -DTOKENS=1

expect fails -DSLOTS=2
expect fails -DNO_REARM
expect fails -DREARM_CURRENT -DLAYERS=5 -DSTEPS=1
expect fails -DSLOT_BY_LAYER -DLAYERS=4 -DTOKENS=1
expect fails -DMORTAL -DNO_FREEZE -DTOKENS=1 -DLAYERS=4
expect fails -DMORTAL -DNO_FIRST_WAIT -DTOKENS=1
expect fails -DMORTAL -DNO_SECOND_WAIT -DTOKENS=1
