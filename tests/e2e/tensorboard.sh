#!/usr/bin/env bash
# The real TensorBoard reads what lockstep writes for it.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"

need_package tensorboard
mkdir "$work/events"
LOCKSTEP_TEST_EVENTS=$work/events "$build/tests/test_kit" --gtest_filter=TensorBoard.WritesEvents >"$work/log" 2>&1 ||
  die "$(cat "$work/log")"
"$python" - "$work/events" <<'EOF'
import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1])
events.Reload()
assert sorted(events.Tags()["scalars"]) == ["loss", "rate/samples"], events.Tags()
losses = events.Scalars("loss")
assert len(losses) == 200, len(losses)
for i, event in enumerate(losses):
    assert event.step == i * 1000 and abs(event.value - 1 / (1 + i)) < 1e-6, event
    assert 1.7e9 < event.wall_time < 4e9, event
assert events.Scalars("rate/samples")[-1].value == 995
EOF
