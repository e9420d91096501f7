"""Every kernel variant compiles for sm_80 and sm_86 without a GPU and stays inside an SM's budget.

Both Triton releases that matter: the one installed here (3.6, in the proofs) and 3.8 (with vLLM 0.33.0's torch 2.14),
which `make test` puts into .triton38. Each compiles in a process of its own: tests run kernels through the interpreter,
and an interpreted module cannot be compiled.
"""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.cli.ops import resource_rows
from deepinfer_sm80.errors import TensorContractError
from deepinfer_sm80.hardware import limits
from deepinfer_sm80.ops.contract import Tolerance
from deepinfer_sm80.ops.resources import Resources
from deepinfer_sm80.ops.variants import all_variants, run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/resources.md"
VARIANTS = {v.key: v for v in all_variants()}


def compiled(triton_path, *architectures):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [triton_path, str(ROOT / "src")]))
    command = [sys.executable, "-m", "deepinfer_sm80.cli", "ops", "--resources", "--json"]
    command += [f"--arch={architecture}" for architecture in architectures]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def folder_of(release):
    """What to put before the installed packages so that ``triton`` is that release."""
    if release == "3.6":
        return ""
    folder = ROOT / ".triton38"
    assert folder.is_dir(), "Triton 3.8 is not in .triton38: run `make test`, which installs it there"
    return str(folder)


@pytest.fixture(scope="module", params=["3.6", "3.8"])
def rows(request):
    found = compiled(folder_of(request.param), "8.0", "8.6")
    assert {row["triton"].rpartition(".")[0] for row in found} == {request.param}
    return found


def test_every_variant_is_compiled_for_both_architectures(rows):
    assert {(f"{r['op']}/{r['variant']}", r["arch"]) for r in rows} == {
        (key, arch) for key in VARIANTS for arch in ("sm_80", "sm_86")
    }


def test_the_page_shows_what_was_compiled(rows):
    """docs/resources.md, which `make docs` writes with both Tritons."""
    page = PAGE.read_text()
    assert [row for row in resource_rows([Resources(**r) for r in rows]) if row not in page] == []
    assert page.count("\n| `") == 2 * 4 * len(VARIANTS), "rows of variants that are gone"


@pytest.mark.slow
@pytest.mark.parametrize("release", ["3.6", "3.8"])
def test_newer_members_of_the_family_run_the_same_code(release):
    """8.7 and 8.9: about a minute for each Triton on two cores."""
    found = compiled(folder_of(release), "8.7", "8.9")
    assert {r["arch"] for r in found} == {"sm_87", "sm_89"}
    test_shared_memory_fits(found)
    test_nothing_spills_without_a_measured_reason(found)
    test_no_instruction_or_type_of_newer_gpus(found)
    test_an_exact_contract_has_no_approximate_instruction(found)
    assert [row for row in resource_rows([Resources(**r) for r in found]) if row not in PAGE.read_text()] == []


def test_shared_memory_fits(rows):
    for r in rows:
        capability = (8, int(r["arch"][-1]))
        assert r["shared_bytes"] <= limits(capability).smem_per_cta, r
        assert r["ctas_per_sm"] >= 1, r


def test_nothing_spills_without_a_measured_reason(rows):
    for r in rows:
        if not VARIANTS[f"{r['op']}/{r['variant']}"].may_spill:
            assert (r["spill_bytes"], r["stack_bytes"]) == (0, 0), r


def test_no_instruction_or_type_of_newer_gpus(rows):
    for r in rows:
        assert r["foreign"] == [], r


def test_an_exact_contract_has_no_approximate_instruction(rows):
    """CUDA's rsqrt is off by up to 2 ulp: it moved one index key's code in 262,144, which no small case shows."""
    exact = {op for op in ops.OPS if _bounds(ops.spec(op)) == {Tolerance.exact()}}
    assert "indexer_k_norm_rope_store" in exact
    assert {r["op"]: r["approximate"] for r in rows if r["op"] in exact and r["approximate"]} == {}


def _bounds(spec):
    return {spec.tolerance_of(name) for name in (*spec.outputs, *spec.mutates)}


def test_keys_are_unique():
    assert len(VARIANTS) == len(list(all_variants()))


def option(function, name):
    """A ``triton.jit`` option of a compiled or an interpreted function."""
    return set(getattr(function, name, None) or getattr(function, "kwargs", {}).get(name) or ())


@pytest.mark.parametrize("key", VARIANTS)
def test_integers_are_not_specialised(key):
    """An integer that Triton specialises on (1, or a multiple of 16) compiles again in the middle of serving."""
    variant = VARIANTS[key]
    function = variant.function()
    free = option(function, "do_not_specialize")
    integers = {name for name, kind in variant.arguments.items() if not kind.startswith("*")}
    assert integers <= free, f"{variant.kernel}: {sorted(integers - free)} are specialised"


@pytest.mark.parametrize("key", VARIANTS)
def test_alignment_is_compiled_as_it_is_checked(key):
    """A pointer that the launch lets through unaligned must not be specialised, and the other way round."""
    variant = VARIANTS[key]
    assert option(variant.function(), "do_not_specialize_on_alignment") == set(variant.unaligned), variant.kernel


@pytest.mark.parametrize("key", VARIANTS)
def test_wide_integers_are_annotated(key):
    """Without an annotation Triton types an integer by its value: i32 today and i64 in the middle of serving."""
    variant = VARIANTS[key]
    annotations = inspect.get_annotations(variant.function().fn)
    wide = {name for name, kind in variant.arguments.items() if kind == "i64"}
    assert {name for name in wide if "int64" not in str(annotations.get(name))} == set()


def test_an_unaligned_pointer_is_refused_by_name():
    variant = next(v for v in VARIANTS.values() if v.op == "mhc_post")
    width = len(variant.arguments)
    arguments = [torch.zeros(64, dtype=torch.bfloat16)[1:], *[torch.zeros(16) for _ in range(width - 1)]]
    with pytest.raises(TensorContractError, match=r"x_ptr must be aligned to 16 bytes, got an address 2 bytes past"):
        run(variant, (1,), *arguments)
