"""The Triton kernels; `common.py` explains how programs divide the maps."""
