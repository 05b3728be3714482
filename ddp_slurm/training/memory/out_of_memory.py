"""Whether an error means that memory ran out, and how to get the rest of it back."""

import gc

import torch

SAYS_SO = (
    "CUDA error: out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""In the messages of RuntimeErrors: of allocations that do not go through torch's GPU allocator."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch may succeed."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in SAYS_SO)


def free_memory(device: torch.device) -> None:
    """Give the GPU's unused blocks back. Call it outside of the ``except`` block: until its end the
    error's traceback holds every tensor of the failed pass."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
