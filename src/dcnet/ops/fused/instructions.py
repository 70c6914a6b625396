"""Which instructions kernels may use. A module of its own, since `compile_worker.py` cannot ask PyTorch."""

import torch
import triton
import triton.language as tl

# whether NVIDIA's instructions (PTX) can be used; Triton's interpreter has none
PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)
