"""The GPUs to plan for: known Ampere cards, any other by its figures, and how they are joined."""

from __future__ import annotations

import dataclasses
import re

from deepinfer_sm80.errors import PlanError

GB, GIB = 10**9, 2**30
HOST_GPUS = 8  # more are rarely in one host
MAX_GPUS = 256
MAX_FIGURE = 100_000  # of an unknown card: GB, GB/s or TFLOP/s
MAX_RAM_TIB = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """``memory``: GiB on the label; ``usable``: GiB that CUDA reports; ``bandwidth``: GB/s; ``tflops``: dense bf16 with
    fp32 accumulation. Bandwidth and TFLOP/s are the data sheets', not measurements."""

    name: str
    memory: int
    usable: float
    bandwidth: float
    tflops: float


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A ring all-reduce's rate in GB/s per GPU and the latency of one small collective in microseconds. ``source``:
    where the two are from."""

    name: str
    rate: float
    latency: float
    source: str = "assumed"


# 64-GB cards: the 0.99 that an 80-GB A100 reports of its label is taken for them too.
KNOWN: tuple[Gpu, ...] = (
    Gpu("A100", 40, 39.4, 1555, 312),
    Gpu("A100", 64, 63.4, 1640, 312),
    Gpu("A100", 80, 79.2, 2039, 312),
    Gpu("A800", 40, 39.4, 1555, 312),
    Gpu("A800", 80, 79.2, 2039, 312),
    Gpu("GA100", 64, 63.4, 1640, 312),
    Gpu("A30", 24, 23.6, 933, 165),
    Gpu("A40", 48, 44.4, 696, 150),
    Gpu("A6000", 48, 47.4, 768, 155),
    Gpu("A10", 24, 22.1, 600, 125),
    Gpu("RTX3090", 24, 23.6, 936, 71),
    Gpu("RTX3090Ti", 24, 23.6, 1008, 80),
)
LINKS: dict[str, Link] = {
    "nvlink": Link("nvlink", 195.7, 6.02, "measured between two NVIDIA H200, docs/multi-gpu.md"),
    "nvlink-bridge": Link("nvlink-bridge", 40.0, 15.0),
    "pcie4": Link("pcie4", 18.0, 25.0),
    "pcie3": Link("pcie3", 9.0, 30.0),
}
NETWORK = Link("100 Gb/s network", 10.0, 40.0)  # between hosts
_LINK_OF = {"A100": "nvlink", "A800": "nvlink", "GA100": "pcie4"}


@dataclasses.dataclass(frozen=True, slots=True)
class Cluster:
    """``count`` equal GPUs on ``hosts`` hosts; ``ram``: bytes of each host, None: as much as it takes."""

    gpu: Gpu
    count: int
    hosts: int = 1
    ram: int | None = None
    link: Link = LINKS["pcie4"]
    taken: str = dataclasses.field(default="", compare=False)  # for what a name of several cards was taken

    @property
    def per_host(self) -> int:
        return self.count // self.hosts

    @property
    def label(self) -> str:
        return f"{self.count}x{self.gpu.name}-{self.gpu.memory}GB"


def cluster(gpus: str, hosts: int = 1, ram: str | None = None, link: str | None = None) -> Cluster:
    """From the command line's words: ``6xA100-64GB``, ``16x24GB`` (the 24-GB card most people have) or
    ``4xMyCard:48GB:900GB/s:150TFLOPS``. Raises PlanError with what is possible."""
    count, gpu, taken = _gpus(gpus)
    if hosts < 1 or count % hosts:
        possible = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        allowed = f"a divisor of {count} ({possible})" if count > 1 else "1 with 1 GPU"
        raise PlanError(option="--hosts", allowed=allowed, found=hosts, remedy="Every host holds as many GPUs.")
    if link is not None and link.lower() not in LINKS:
        raise PlanError(
            option="--link", allowed=f"one of {', '.join(LINKS)}", found=repr(link), remedy="Name the slowest."
        )
    name = (link or "").lower() or _LINK_OF.get(gpu.name, "pcie4")
    return Cluster(gpu, count, hosts, None if ram is None else size(ram, "--ram"), LINKS[name], taken)


def size(text: str, option: str) -> int:
    """Bytes of ``512GB`` or ``512GiB``; both mean GiB, as memory is sold."""
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(T|G)i?B?", text.strip(), re.IGNORECASE)
    gib = float(found[1]) * (1024 if found[2].upper() == "T" else 1) if found else 0.0
    if not 1 <= gib <= 1024 * MAX_RAM_TIB:
        allowed = f"a size such as 512GB or 1TB, 1GB to {MAX_RAM_TIB}TB"
        raise PlanError(option=option, allowed=allowed, found=shown(text), remedy="Name the unit.")
    return int(gib * GIB)


def shown(text: str) -> str:
    """``text`` as a message quotes it: on one line, cut where it is long."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _gpus(text: str) -> tuple[int, Gpu, str]:
    found = re.fullmatch(r"\s*([0-9]+)\s*[x*\u00d7]\s*(\S+)\s*", text, re.IGNORECASE)
    if re.search(r"[+,;&]", text):
        raise _bad(text, allowed="GPUs of one kind, the smallest of them standing for all")
    if not found:
        raise _bad(text)
    digits, card = found[1].lstrip("0"), found[2]
    if not digits or len(digits) > 3 or int(digits) > MAX_GPUS:
        raise PlanError(
            option="--gpus", allowed=f"1 to {MAX_GPUS} GPUs", found=shown(text), remedy="Plan one group of GPUs."
        )
    count = int(digits)
    if ":" in card:
        return count, _unknown(card, text), ""
    name, _, memory = card.rpartition("-")
    memory = re.sub(r"g?(i?b)?$", "", memory.lower())
    if not re.fullmatch(r"[0-9]{1,3}", memory):  # RTX-3090 has no memory in its name
        name, memory = card, ""
    fits = [gpu for gpu in KNOWN if (not name or _plain(gpu.name) == _plain(name)) and memory in ("", str(gpu.memory))]
    if not fits:
        raise _bad(text, allowed="a number and a known card")
    matching = fits
    if not name and memory == "24":
        fits = [gpu for gpu in fits if gpu.name == "RTX3090"]
    gpu = fits[-1] if not memory else fits[0]
    return count, gpu, _taken(card, gpu, count, [other for other in matching if other is not gpu])


def _taken(card: str, gpu: Gpu, count: int, others: list[Gpu]) -> str:
    """The card that was chosen of several that ``card`` may mean, and how to say another; empty where it is the one."""
    rest = " or ".join(f"{count}x{other.name}-{other.memory}GB" for other in others)
    return f"{card} was taken as {gpu.name}-{gpu.memory}GB; for another say {rest}." if others else ""


def _unknown(card: str, text: str) -> Gpu:
    number = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"
    found = re.fullmatch(rf"([^:]+):{number}Gi?B:{number}GB/s:{number}(?:TF|TFLOPS|TFLOP/s)", card, re.IGNORECASE)
    if not found:
        raise _bad(text)
    memory, bandwidth, tflops = (float(found[i]) for i in (2, 3, 4))
    if not all(1 <= figure <= MAX_FIGURE for figure in (memory, bandwidth, tflops)):
        raise _bad(text, allowed=f"a card of 1 to {MAX_FIGURE:,} GB, GB/s and TFLOP/s")
    return Gpu(found[1], int(memory), round(0.985 * memory, 1), bandwidth, tflops)


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]|geforce|nvidia|rtx", "", name.lower())


def same_card(said: str, gpu: Gpu) -> bool:
    """Whether the name that CUDA gives a card, such as ``NVIDIA A100-SXM4-80GB``, is that of ``gpu``."""
    words = re.findall(r"[a-z0-9]+", said.lower())
    sizes = [word for word in words if re.fullmatch(r"[0-9]+gb", word)]
    name = "".join(word for word in words if word not in sizes and not re.fullmatch(r"sxm[0-9]*|pcie", word))
    return _plain(name) == _plain(gpu.name) and sizes in ([], [f"{gpu.memory}gb"])


def _bad(text: str, allowed: str = "a number and a card, such as 8xA100-80GB") -> PlanError:
    known = ", ".join(f"{gpu.name}-{gpu.memory}GB" for gpu in KNOWN)
    return PlanError(
        option="--gpus",
        allowed=allowed,
        found=shown(text),
        remedy=f"Known cards, those this package serves: {known}. Any other Ampere card by memory, bandwidth and "
        "dense bf16 TFLOP/s: 8xMyCard:48GB:900GB/s:150TFLOPS.",
    )
