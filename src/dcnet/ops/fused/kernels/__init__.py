"""The Triton kernels; `common.py` says how maps are divided among programs."""
