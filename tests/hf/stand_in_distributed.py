"""Stand-in for `distributed_testing_utils` of transformers' tests: run a function in several processes."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _get_distributed_device_type() -> str:
    return accelerator.type if (accelerator := torch.accelerator.current_accelerator(check_available=True)) else "cpu"


def _get_distributed_backend() -> str:
    return dist.get_default_backend_for_device(_get_distributed_device_type())


def _get_rank_device(rank: int) -> torch.device:
    kind = _get_distributed_device_type()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, rank)


def _set_rank_device(rank: int) -> None:
    torch.set_num_threads(1)  # processes share the cores
    if _get_distributed_device_type() != "cpu":
        torch.accelerator.set_device_index(rank)


def _start_rank_processes(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Call `function(rank, *args)` in a process for each rank; raise if one of them fails."""
    mp.spawn(function, args=args, nprocs=nprocs)


def _in_group(
    rank: int, function: Callable[..., None], args: tuple[Any, ...], world_size: int, host: str, port: int
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    _set_rank_device(rank)
    store = dist.TCPStore(host, port, is_master=False)
    dist.init_process_group(_get_distributed_backend(), store=store, rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def run_distributed(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a function `function(rank, *args)` run in `world_size` processes of one group."""

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*args: Any) -> None:
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            _start_rank_processes(_in_group, (function, args, world_size, store.host, store.port), world_size)

        return run

    return wrap
