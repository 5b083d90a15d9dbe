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
    """The engine that runs the clients; `engine = "serial"` is short for `engine.name`."""

    name: EngineName = Field(
        "auto",
        description="serial: one client at a time; batched: clients side by side; flower: on nodes; ray: on actors; auto: the faster one",
    )
    kernel: KernelName = Field(
        "auto",
        description="vectorised: all clients in one batched program; streamed: one program per client; sparse: active links only, on CPUs",
    )
    isa: IsaName = Field("auto", description="instruction set of the sparse kernel; auto: the best that this machine has")
    slots: int = Field(0, ge=0, description="clients that train side by side; 0: all clients of a round, if memory allows")
    workers: int = Field(0, ge=0, description="threads that share the slots on a CPU; 0: one, or one per core with the sparse kernel")
    precision: Precision = Field("float32", description="float32, tf32 or bf16 (both on GPUs; weights stay float32)")
    actors: int = Field(0, ge=0, description="ray: number of actors that share a round's clients; 0: one per GPU of this machine, or two")
    cpus: Number = Field(0.0, ge=0, description="ray: CPUs per actor, fractions allowed; 0: an equal share of this machine's")
    gpus: Number = Field(0.0, ge=0, description="ray: GPUs per actor, fractions allowed; 0: one where clients train on GPUs")
    address: str = Field("local", description="ray: local starts one on loopback; auto or HOST:PORT joins a cluster")
    nodes: int = Field(2, ge=1, description="flower: number of nodes on this machine that share the clients of `fedrts run`")
    timeout: Number = Field(3600.0, gt=0, description="flower: longest time, in seconds, that nodes may take to reply")
    wait: Number = Field(600.0, ge=0, description="flower: seconds to wait for nodes before continuing without them")
    patience: Number = Field(
        5.0, ge=0, description="flower: deadline as a multiple of clients' recent times, between 10 s and timeout; 0: always timeout"
    )
