"""An imagined GPU: tensors say that they are on cuda:0, and refuse to meet those of the CPU as
CUDA's do.

CPU kernels compute. What only a GPU can show is not shown: its own kernels, speed, compiled code,
NCCL. Nor is what is made on the CPU by name, like a GPU's tensor, as ``zeros_like(there,
device="cpu")``: autograd asks in the same words.
"""

import contextlib
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from energynn.train import distributed

BACKENDS = {"nccl": "gloo"}  # any other one is refused
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
# What CUDA lets tensors of both devices meet in: copies, and a GPU's tensor indexed by a CPU's.
MEET = (
    "aten::copy_",
    "aten::_to_copy",
    "aten::index",
    "aten::index_put_",
    "aten::_index_put_impl_",
)


class ImaginedGPU(TorchDispatchMode):
    """While it is entered, the storages of tensors that were made on or brought to cuda:0 are
    remembered as there.
    """

    def __init__(self):
        super().__init__()
        # a weak reference keeps a storage's address from being used again
        self.there: dict[int, StorageWeakRef] = {}

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.there

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        given = [
            value
            for value in tree_iter((arguments, keywords))
            if isinstance(value, torch.Tensor)
        ]
        are_there = [self.holds(tensor) for tensor in given]
        name = function.name().split(".")[0]
        asked = keywords.get("device")
        self.refuse_strangers(name, given, are_there)
        goes_there = any(are_there)
        if asked is not None:
            # Autograd asks for the device of its inputs by its name, which is the CPU to the
            # kernels.
            goes_there = goes_there or torch.device(asked).type == "cuda"
            keywords["device"] = CPU
        before = {tensor.untyped_storage()._cdata for tensor in given}
        result = function(*arguments, **keywords)
        made = [value for value in tree_iter(result) if isinstance(value, torch.Tensor)]
        for storage in (tensor.untyped_storage() for tensor in made):
            if goes_there and storage._cdata not in before:
                self.there[storage._cdata] = StorageWeakRef(storage)
        return result

    def refuse_strangers(
        self, name: str, given: list[torch.Tensor], are_there: list[bool]
    ) -> None:
        """Raise RuntimeError where a GPU's tensor meets a CPU's, and where NCCL gets one.

        A CPU's single number may be read, but not changed by a GPU's; a CPU's tensor has no index
        on a GPU.
        """
        strangers = [
            tensor
            for tensor, is_there in zip(given, are_there, strict=True)
            if not is_there and tensor.ndim
        ]
        if any(are_there) and name != "aten::copy_":
            is_target = name.endswith("_") or name == "aten::index"
            if (strangers and name not in MEET) or (is_target and not are_there[0]):
                shape = given[are_there.index(False)].shape
                raise RuntimeError(
                    f"{name}: expected all tensors on one device, but one is on cpu: {shape}"
                )
        if name.startswith("c10d::") and any(
            tensor.is_floating_point() for tensor in strangers
        ):
            raise RuntimeError(
                f"{name}: no backend of NCCL for a tensor of {strangers[0].shape} on cpu"
            )


class Event:
    """Of the queue: the work is done when it is asked for, so the time of the CPU is that of the
    queue.
    """

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.time_s = time.perf_counter()

    def elapsed_time(self, end) -> float:
        return 1000 * (end.time_s - self.time_s)


class Alone(torch.nn.Module):
    """DistributedDataParallel of one rank; the real one makes its buckets where no device mode
    sees them.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[torch.device],
        gradient_as_bucket_view: bool,
    ):
        super().__init__()
        assert device_ids == [GPU] and all(
            values.device == GPU for values in module.state_dict().values()
        )
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)


@contextlib.contextmanager
def imagined(patch):
    """Within it torch has one GPU; ``patch`` is pytest's monkeypatch."""
    gpu = ImaginedGPU()
    real_to, real_numpy = torch.Tensor.to, torch.Tensor.numpy
    real_tensor, real_init = torch.tensor, dist.init_process_group

    def cpu(tensor):
        return (
            torch.zeros(tensor.shape, dtype=tensor.dtype).copy_(tensor)
            if gpu.holds(tensor)
            else tensor
        )

    def to(tensor, *arguments, **keywords):
        device = keywords.get("device", arguments[0] if arguments else None)
        asks_for_cpu = (
            isinstance(device, str | torch.device)
            and torch.device(device).type == "cpu"
        )
        return real_to(cpu(tensor) if asks_for_cpu else tensor, *arguments, **keywords)

    def numpy(tensor, **options):
        if gpu.holds(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return real_numpy(tensor, **options)

    patch.setattr(torch.Tensor, "to", to)
    patch.setattr(torch.Tensor, "cpu", cpu)
    patch.setattr(torch.Tensor, "numpy", numpy)
    patch.setattr(
        torch.Tensor,
        "device",
        property(lambda tensor: GPU if gpu.holds(tensor) else CPU),
    )
    patch.setattr(
        torch,
        "tensor",
        lambda values, device=CPU, **options: real_tensor(values, **options).to(device),
    )
    patch.setattr(torch, "autocast", autocast)
    # loaders ask for it before they pin memory
    patch.setattr(torch.accelerator, "is_available", lambda: False)
    patch.setattr(
        dist,
        "init_process_group",
        lambda backend, **options: real_init(BACKENDS[backend], **options),
    )
    patch.setattr(distributed, "DistributedDataParallel", Alone)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(name="imagined", uuid="fake-0"),
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "max_memory_allocated": 10**9,
        "is_bf16_supported": True,
    }
    answers["is_current_stream_capturing"] = False
    for name in (
        "set_device",
        "synchronize",
        "get_rng_state",
        "set_rng_state",
        "_lazy_init",
    ):
        answers[name] = None
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    patch.setattr(torch.cuda, "Stream", contextlib.nullcontext)
    patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    patch.setattr(torch.cuda, "_sleep", lambda cycles: time.sleep(cycles * 1e-10))
    with gpu:
        yield gpu


@contextlib.contextmanager
def autocast(
    device_type: str, dtype: torch.dtype = torch.bfloat16, enabled: bool = True
):
    """That of both devices: the code asks for CUDA's, the kernels are the CPU's."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
    with torch.amp.autocast("cpu", dtype, enabled=enabled):
        yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])
