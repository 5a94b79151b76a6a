#!/usr/bin/env bash
# Python's safetensors reads lockstep's files, and lockstep reads Python's, to the bit.
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"

need_package safetensors
"$python" - "$work" <<'EOF'
import sys
import torch
from safetensors.torch import save_file

types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
         torch.uint8, torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
torch.manual_seed(1)
tensors = {str(t): torch.randint(0, 2, (3, 5)).to(t) if t == torch.bool else
           torch.randint(0, 255, (3, 5 * t.itemsize), dtype=torch.uint8).view(t) for t in types}
tensors["scalar"] = torch.tensor(2.5)
tensors["empty"] = torch.empty(0, 7)
tensors["a name with \"quotes\" and ü"] = torch.arange(3)
save_file(tensors, sys.argv[1] + "/python.safetensors", metadata={"by": "Python"})
EOF
cd "$work"
"$build/tests/lockstep_test_copy_tensors" python.safetensors ours.safetensors || die "lockstep cannot read Python's file"
"$build/bin/lockstep" inspect --diff python.safetensors ours.safetensors || die "the copy differs"
"$build/bin/lockstep" inspect ours.safetensors | grep -q 'torch.bfloat16  *BF16 \[3, 5\]' || die "inspect does not list the tensors"
"$python" - <<'EOF'
import torch
from safetensors.torch import load_file

theirs, ours = load_file("python.safetensors"), load_file("ours.safetensors")
assert theirs.keys() == ours.keys() and len(ours) == 19, (theirs.keys(), ours.keys())
for name, tensor in theirs.items():
    assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
    assert torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
EOF
