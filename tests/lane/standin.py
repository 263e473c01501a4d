"""A device that is neither the CPU nor a GPU: torch's backend for devices written in Python, called ``standin``.

Importing this module registers it for the whole process, so only the processes of the lane do. ``torch.standin`` has
what the suite needs of ``torch.cuda`` (``suite.device``), and under bf16 autocast operators get the types that they get
on CUDA. Tensors need ``tests.lane.mode``.
"""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils import backend_registration

COUNT = 4
"""Stand-in devices, as a node has GPUs."""


class Event:
    """An event that has happened when it is recorded."""

    def __init__(self, enable_timing=False):
        self.timed = enable_timing

    def record(self, stream=None):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        assert self.timed
        assert other.timed
        return 0.0


class StandinModule(backend_registration._DummyBackendModule):
    """``torch.standin``. One generator a device; no memory is in use."""

    Event = Event

    def __init__(self):
        self.default_generators = [torch.Generator() for _ in range(COUNT)]
        self.on_synchronize = lambda: None
        """Called when the host waits for the device."""

    def device_count(self):
        return COUNT

    def synchronize(self, device=None):
        self.on_synchronize()

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed):
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device):
        return self.default_generators[torch.device(device).index].get_state()

    def set_rng_state(self, state, device):
        self.default_generators[torch.device(device).index].set_state(state)

    def get_device_properties(self, device):
        return SimpleNamespace(name="stand-in", total_memory=80 << 30)

    def memory_allocated(self, device):
        return 0

    max_memory_allocated = memory_reserved = memory_allocated


IN_BF16 = (
    "addbmm addmm addmv baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d.input linear matmul mm mv "
    "prelu scaled_dot_product_attention lstm.input gru.input"
)
IN_FP32 = (
    "layer_norm softmax.int log_softmax.int cross_entropy_loss nll_loss mse_loss l1_loss smooth_l1_loss cumsum exp "
    "log pow.Tensor_Scalar sum sum.dim_IntList cosine_similarity linalg_vector_norm"
)
"""Operators that autocast on CUDA computes in bf16 and in fp32, as far as models here use them:
https://docs.pytorch.org/docs/stable/amp.html."""

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

_CASTS = {}
"""Weights that autocast has cast, by id, until its outermost context ends."""


def _clear_casts(original=torch.clear_autocast_cache):
    _CASTS.clear()
    original()


def _cast(tensor, dtype):
    if dtype is not torch.bfloat16 or not (
        tensor.is_leaf and tensor.requires_grad and torch.is_autocast_cache_enabled()
    ):
        return tensor.to(dtype)
    if id(tensor) not in _CASTS:
        _CASTS[id(tensor)] = tensor, tensor.to(dtype)
    return _CASTS[id(tensor)][1]


def _autocast(name, dtype):
    """Returns an operator's kernel under autocast: it casts the floating arguments."""
    overload = getattr(getattr(torch.ops.aten, name.partition(".")[0]), name.partition(".")[2] or "default")

    def cast(value):
        if isinstance(value, (list, tuple)):
            return type(value)(map(cast, value))
        narrow = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.bfloat16)
        return _cast(value, dtype) if narrow and value.dtype != dtype else value

    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return overload(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return kernel


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Attention that is fused, as on CUDA: it saves no scores."""
    if enable_gqa:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


backend_registration._setup_privateuseone_for_python_backend("standin", backend_module=StandinModule())
_OTHERS = torch.library.Library("_", "IMPL")
_OTHERS.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
_LIBRARY = torch.library.Library("aten", "IMPL")
for _dtype, _names in ((torch.bfloat16, IN_BF16), (torch.float32, IN_FP32)):
    for _name in _names.split():
        _LIBRARY.impl(_name, _autocast(_name, _dtype), "AutocastPrivateUse1")
_LIBRARY.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
_LIBRARY.impl("scaled_dot_product_attention", _attention, "PrivateUse1")
torch.clear_autocast_cache = _clear_casts

DEVICE = torch.device("standin", 3)
"""The device of the tests. Its index is not 0, so an index that is lost shows."""
