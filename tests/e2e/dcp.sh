#!/usr/bin/env bash
# PyTorch's distributed checkpoint (torch.distributed.checkpoint) reads lockstep's checkpoints, to the bit: loads
# them, and makes one file of them, as docs/checkpoints.md says.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"

need_package safetensors
need_package torch
lockstep=$build/bin/lockstep
saver=$build/tests/lockstep_test_saver
cd "$work"

# Three ranks and three tensors: one rank has nothing to write.
"$lockstep" run -n 2 -- "$saver" saved >log 2>&1 || die "$(cat log)"
"$lockstep" run -n 3 -- "$saver" few 1 >log 2>&1 || die "$(cat log)"
mkdir -p runs/a
mv saved/0-step-3 runs/a/3-step-4000 # where the document has it

cat >support.py <<'END'
import glob
import json
import struct
import torch
from safetensors.torch import load_file

class Net(torch.nn.Module):  # as in tests/programs/saver.cpp
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.fc = torch.nn.Linear(64, 8)
        self.small = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
        self.scale = torch.nn.Parameter(torch.tensor(0.))

def files(checkpoint):
    return sorted(glob.glob(checkpoint + "/*.safetensors"))

# All tensors of a checkpoint, by the package that PyTorch's code does not share.
def all_tensors(checkpoint):
    tensors = {}
    for file in files(checkpoint):
        more = load_file(file)
        assert not tensors.keys() & more.keys(), (file, tensors.keys() & more.keys())
        tensors |= more
    return tensors

def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)

def check_equal(name, left, right):
    assert left.dtype == right.dtype and left.shape == right.shape, (name, left, right)
    assert torch.equal(bits(left), bits(right)), name

# Another value in every bit: what is not loaded is seen.
def other(tensor):
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    if tensor.numel():
        bits(tensor).bitwise_xor_(1 if tensor.dtype == torch.bool else 255)
    return tensor

# Writes a file of a checkpoint again, with other metadata.
def change_metadata(file, change):
    with open(file, "rb") as f:
        length = struct.unpack("<Q", f.read(8))[0]
        header, data = json.loads(f.read(length)), f.read()
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    with open(file, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)
END

{
  echo 'from support import *; model = Net()'
  fenced "$repo/docs/checkpoints.md" "python dcp"
  cat <<'END'
want = all_tensors("runs/a/3-step-4000")
for name, tensor in model.state_dict().items():
    check_equal(name, tensor, want["model." + name])
for place, states in state["optimizer"].items():
    for name, tensor in states.items():
        check_equal(name, tensor, want[f"optimizer.{place}.{name}"])
assert len(state["optimizer"]) == 9 and state["optimizer"][5]["exp_avg"].count_nonzero() > 0, state["optimizer"]
whole = load_file("whole/model-00001-of-00001.safetensors")
wanted = {name for name, tensor in want.items() if tensor.is_floating_point() and tensor.dim() > 0}
assert whole.keys() == wanted and len(wanted) > 30, whole.keys() ^ wanted
for name, tensor in whole.items():
    check_equal(name, tensor, want[name])
END
} >documented.py
"$python" -W ignore documented.py || die "the documented program"
expect "whole/model-00001-of-00001.safetensors: whole" "$lockstep" inspect whole/model-00001-of-00001.safetensors
expect "whole" "$lockstep" inspect runs/a/3-step-4000
expect "no difference" "$lockstep" inspect --diff runs/a/3-step-4000 runs/a/3-step-4000
"$lockstep" inspect runs/a/3-step-4000 | grep -q DCP && die "inspect shows metadata as something of the run"

"$python" -W ignore - <<'END' || die "every tensor, and checkpoints whose metadata are broken"
from support import *
import logging
import os
import shutil
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

def load(checkpoint, want, threads=1):
    state = {name: other(tensor) for name, tensor in want.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(checkpoint, thread_count=threads))
    for name, tensor in state.items():
        check_equal(name, tensor, want[name])

def consolidate(checkpoint, want):
    shutil.rmtree("one", ignore_errors=True)
    os.mkdir("one")
    consolidate_safetensors_files(checkpoint, "one", {name: 1 for name in want})
    one = load_file("one/model-00001-of-00001.safetensors")
    assert one.keys() == want.keys(), one.keys() ^ want.keys()
    for name, tensor in one.items():
        check_equal(name, tensor, want[name])

def floats(tensors):
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.dim() > 0}

trained, few = "runs/a/3-step-4000", "few/0-step-0"
assert [os.path.basename(file) for file in files(trained)] == [
    "rank-0-of-2.safetensors", "rank-1-of-2.safetensors", "tensors-0-of-2.safetensors", "tensors-1-of-2.safetensors"]
want = all_tensors(trained)
assert {str(tensor.dtype)[6:] for tensor in want.values()} == {
    "float32", "bfloat16", "float64", "int64", "uint8", "bool", "complex64"}, "the saver has lost a type"
assert {tensor.dim() for tensor in want.values()} == {0, 1, 2, 4}
for threads in 1, 4:
    load(trained, want, threads)
consolidate(trained, floats(want))
assert len(files(few)) == 2, "a rank that has no tensor to write has written a file, or all three have some"
load(few, all_tensors(few))
consolidate(few, floats(all_tensors(few)))

# The checks above find metadata that are missing, incomplete or wrong. (PyTorch prints what it throws, too.)
logging.disable()
KEY = "DCP_SHARDING_INFO"

def remove(metadata):
    del metadata["DCP_VERSION"], metadata[KEY]

def change_offsets(change):
    def changed(metadata):
        offsets = json.loads(metadata[KEY])
        if "model.fc.weight" in offsets:
            change(offsets)
        metadata[KEY] = json.dumps(offsets)
    return changed

def must_fail(name, work):
    try:
        work()
    except (AssertionError, KeyError, ValueError, dcp.CheckpointException):
        return
    raise SystemExit(name + " was not noticed")

for name, change, is_loadable in [
        ("no metadata", remove, True),  # as files had it that lockstep wrote earlier
        ("no offsets", change_offsets(lambda offsets: offsets.pop("model.fc.weight")), False),
        ("an offset that is wrong", change_offsets(lambda offsets: offsets["model.fc.weight"].update(saved_offsets=[1, 0])), False),
        ("an offset too few", change_offsets(lambda offsets: offsets["model.fc.weight"].update(saved_offsets=[0])), False)]:
    shutil.rmtree("broken", ignore_errors=True)
    shutil.copytree(trained, "broken")
    for file in files("broken"):
        change_metadata(file, change)
    assert all_tensors("broken").keys() == want.keys()
    must_fail(name, lambda: consolidate("broken", floats(want)))
    if is_loadable:
        load("broken", want)
    else:
        must_fail(name, lambda: load("broken", want))
END
