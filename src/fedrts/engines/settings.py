"""The table `[engine]`: which engine runs the clients, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedrts.engines.kernels import Precision
from fedrts.tables import Number, Table

EngineName = Literal["auto", "serial", "batched", "flower", "ray"]
KernelName = Literal["auto", "vectorised", "streamed", "sparse"]
IsaName = Literal["auto", "portable", "avx2", "avx512"]


class EngineSettings(Table):
    """Who runs the clients; `engine = "serial"` is short for `engine.name`."""

    name: EngineName = Field(
        "auto",
        description="serial: one client after the other; batched: side by side; flower: on nodes; ray: among actors; auto: what is faster",
    )
    kernel: KernelName = Field(
        "auto",
        description="side by side as one vectorised program; streamed: one program a client; sparse: only active links, on CPUs",
    )
    isa: IsaName = Field("auto", description="instruction set of the sparse kernel; auto: the best of this machine")
    slots: int = Field(0, ge=0, description="clients that train side by side; 0: all of a round, if there is memory")
    workers: int = Field(0, ge=0, description="threads that share the slots on a CPU; 0: one, with the sparse kernel one a core")
    precision: Precision = Field("float32", description="float32, tf32 or bf16 (both on GPUs; weights stay float32)")
    actors: int = Field(0, ge=0, description="ray: among so many the clients of a round are divided; 0: one a GPU of this machine, or two")
    cpus: Number = Field(0.0, ge=0, description="ray: CPUs of an actor, fractions too; 0: an equal share of this machine's")
    gpus: Number = Field(0.0, ge=0, description="ray: GPUs of an actor, fractions too; 0: one where clients train on GPUs")
    address: str = Field("local", description="ray: local starts one on loopback; auto or HOST:PORT joins a cluster")
    nodes: int = Field(2, ge=1, description="flower: nodes on this machine, among which `fedrts run` divides the clients")
    timeout: Number = Field(3600.0, gt=0, description="flower: seconds that nodes have for an order")
    wait: Number = Field(600.0, ge=0, description="flower: seconds to wait for nodes before going on without them")
    patience: Number = Field(
        5.0, ge=0, description="flower: nodes have so many times as long as clients took of late, 10 s to timeout; 0: always timeout"
    )
