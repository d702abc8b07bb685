"""The GPU that a launch runs on: its architecture, multiprocessors and current stream.

The kernels' calls of private torch functions are here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch.autograd import forward_ad


@lru_cache(maxsize=64)
def device_arch(device: torch.device) -> int:
    """Ten times the compute capability; CPU tensors (the interpreter) count as 80."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors: the programs of a persistent grid; 4 for CPU tensors."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


# Bound once, because a replayed launch takes so few microseconds that every lookup counts.
# Builds of torch for the CPU lack the functions of CUDA.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)

REFUSALS = (TypeError, ValueError, AttributeError, SystemError)
"""What replays raise where Triton's launchers, no public interface, do not take the arguments."""


def on_device(
    values: Sequence[int] | torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Numbers of the host as a tensor of ``dtype`` on ``device``, without waiting for a GPU."""
    found = torch.as_tensor(values, dtype=dtype)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def captures(device: torch.device) -> bool:
    """Whether a CUDA graph records what this thread launches on ``device``."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled
_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active


def transformed() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is at work."""
    return _transforms() or forward_ad._current_level >= 0


def plain(*tensors: torch.Tensor | None) -> bool:
    """Whether these hold what they seem to, and nothing traces or transforms calls."""
    return (
        not torch.compiler.is_compiling()
        and all(x is None or (type(x) is torch.Tensor and not x.is_meta) for x in tensors)
        and not dispatch_modes()
        and not transformed()
    )
