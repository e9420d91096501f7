"""Agreement of vLLM with the specification ``deepinfer_sm80.model``, run on the GPU that is there, or without one.

spec-full     prompt log-probabilities of both arms, every layer computed for every token: the specification choosing by
              itself, then with the experts and compressed rows that the arm chose; how near to a tie every choice was
              that differs; negative log-likelihoods. A third arm is the specification with its sums in another order
spec-replay   log-probabilities of generated tokens on vLLM's default path, the specification taking the same steps
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from limits import MEAN

if TYPE_CHECKING:
    import pathlib

    import torch

    from deepinfer_sm80.model.choices import Choice
    from deepinfer_sm80.model.forward import TextModel

ARMS = ("plugin", "stock")
WORST = 0.1  # |difference| of any token, the specification going on with the arm's choices
# How far rounding moves the likelihood of a text is measured: by another order and by three roundings of every product.
# Errors of tokens are not independent (a rounded weight errs the same way for all), so a standard error of the mean
# says too little: 5,200 tokens of ``tiny`` were moved by 0.0001 in another order, by 0.0006 with another rounding.
ROUNDINGS = (1, 2, 3)
TIMES = 4  # times the root mean square of these moves
LIKELIHOOD = MEAN / 5  # and never more than that

# The largest error of a score that may explain another choice. Another order of the sums alone, float32 products and
# bfloat16 results as they are (tiny, 700 tokens, choices imposed), moves router scores by 0.0016 RMS and at most 0.009,
# and index scores, whose queries and keys are e4m3, by 0.004 RMS and at most 0.055 of the query's largest.
TIES = {"experts": 2.0**-6, "rows": 2.0**-4}
ORDER = "other order"


def specification(model: pathlib.Path, **switches: Any) -> TextModel:
    """The checkpoint as the specification, its products in float32 throughout."""
    import torch

    from deepinfer_sm80.model.forward import TextModel
    from deepinfer_sm80.model.switches import Switches

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return TextModel.from_checkpoint(model, Switches(**switches), device)


def distribution(differences: torch.Tensor) -> dict[str, Any]:
    """Of |difference|: mean, quantiles and the largest; ``tokens`` is how many there are."""
    import torch

    size = differences.abs().double()
    p50, p90, p99 = torch.quantile(size, torch.tensor([0.5, 0.9, 0.99], dtype=torch.double)).tolist()
    values = {"mean": size.mean().item(), "p50": p50, "p90": p90, "p99": p99, "largest": size.max().item()}
    return {"tokens": len(size)} | {name: round(value, 5) for name, value in values.items()}


def load_arm(out: pathlib.Path, arm: str) -> list[dict[str, Any]]:
    """What ``logprobs-ARM`` saved. Raises AssertionError for a file without the prompts' token ids."""
    import torch

    entries = torch.load(out / f"logprobs-{arm}.pt")
    if not all("prompt" in entry for entry in entries):
        raise AssertionError(
            f"logprobs-{arm}.pt holds no prompts: an older logprobs-{arm} wrote it; run that stage with --again"
        )
    return entries


class Flips:
    """Choices of an arm that the specification would not have made, by kind and layer."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], dict[str, Any]] = {}

    def add(self, kind: str, layer: int, found: Choice) -> None:
        none = {"queries": 0, "flips": 0, "largest_tie": 0.0, "beyond": 0, "surplus": 0}
        row = self.rows.setdefault((kind, layer), {"kind": kind, "layer": layer, **none})
        row["queries"] += len(found.tie)
        row["flips"] += int(found.flipped.sum())
        row["largest_tie"] = max(row["largest_tie"], found.tie.max().item())
        row["beyond"] += int((~(found.tie <= TIES[kind])).sum())
        row["surplus"] += int((found.surplus > 0).sum())

    def total(self, name: str) -> int:
        """The sum of a column over all kinds and layers."""
        return sum(row[name] for row in self.rows.values())


def forced_run(spec: TextModel, entry: dict[str, Any], flips: Flips) -> torch.Tensor:
    """Log-probabilities of an entry's prompt with its choices; counts the flips. float32 on the CPU."""
    from deepinfer_sm80.model.choices import Choices

    choices = Choices(*({k: v.long() for k, v in entry[name].items()} for name in ("experts", "topk")))
    logprobs = spec.prompt_logprobs(entry["prompt"], choices).cpu()
    for kind, layers in (("experts", choices.experts), ("rows", choices.rows)):
        for layer, found in layers.items():
            for step in found:
                flips.add(kind, layer, step)
    return logprobs


def watched_run(spec: TextModel, prompt: list[int]) -> dict[str, Any]:
    """What ``logprobs-ARM`` saves of a prompt, of the specification itself."""
    from deepinfer_sm80.model.attention import packed
    from deepinfer_sm80.model.choices import Choices

    choices, config = Choices(), spec.config
    logprobs = spec.prompt_logprobs(prompt, choices).cpu()
    kinds = (("experts", choices.experts, config.num_experts_per_tok), ("topk", choices.rows, config.index_topk))
    chosen = {name: {layer: packed(found[0].own, most) for layer, found in made.items()} for name, made, most in kinds}
    return {"prompt": prompt, "logprobs": logprobs, **chosen}


def spec_full(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Both arms against the specification. Fails where a limit of this file is exceeded."""
    import torch

    from deepinfer_sm80.model import sensitivity

    arms = {arm: load_arm(out, arm) for arm in ARMS}
    for arm, entries in arms.items():
        if not all(entry[name] for entry in entries for name in ("experts", "topk")):
            raise AssertionError(f"logprobs-{arm}.pt holds no choices of experts or rows: its recorder saw none")
    prompts = [entry["prompt"] for entry in arms["plugin"]]
    if any([entry["prompt"] for entry in entries] != prompts for entries in arms.values()):
        raise AssertionError("the arms ran different prompts: repeat both logprobs stages with --again")
    spec = specification(model)
    arms[ORDER], flips = [], {arm: Flips() for arm in (*ARMS, ORDER)}
    runs: dict[str, list[torch.Tensor]] = {name: [] for name in ("free", *flips)}
    rounded: dict[int, list[torch.Tensor]] = {seed: [] for seed in ROUNDINGS}
    with torch.no_grad():
        for number, prompt in enumerate(prompts):
            runs["free"].append(spec.prompt_logprobs(prompt).cpu())
            with sensitivity.other_order():
                arms[ORDER].append(watched_run(spec, prompt))
            for seed, parts in rounded.items():
                with sensitivity.rounding_noise(seed):
                    parts.append(spec.prompt_logprobs(prompt).cpu())
            for arm, entries in arms.items():
                runs[arm].append(forced_run(spec, entries[number], flips[arm]))
    free, *forced = (torch.cat(parts) for parts in runs.values())
    noisy = {ORDER: torch.cat([entry["logprobs"] for entry in arms[ORDER]])}
    noisy |= {f"rounding {seed}": torch.cat(parts) for seed, parts in rounded.items()}
    moves = {name: free.double().mean().item() - found.double().mean().item() for name, found in noisy.items()}
    allowed = likelihood_limit(list(moves.values()))
    rows = {
        arm: judge(free, imposed, entries, flips[arm], allowed)
        for (arm, entries), imposed in zip(arms.items(), forced, strict=True)
    }
    if flips["plugin"].total("surplus"):
        rows["plugin"]["failed"].append("rows beyond the candidates")
    facts = {"device": str(spec.device), "tokens": len(free), "nll": round(-free.double().mean().item(), 5)}
    for arm, row in rows.items():
        facts[arm] = (
            f"mean {row['free']['mean']}, forced worst {row['forced']['largest']}, nll {row['nll']}, "
            f"failed: {' and '.join(row['failed']) or 'nothing'}"
        )
    limits = {
        "reordered": "every product",
        "mean": MEAN,
        "worst": WORST,
        "ties": TIES,
        "nll": round(allowed, 5),
        "times": TIMES,
        "moves": {name: round(move, 5) for name, move in moves.items()},
    }
    ok = not any(row["failed"] for row in rows.values())
    return {"ok": ok, "facts": facts, "arms": rows, "nll": facts["nll"], "limits": limits}


def likelihood_limit(moves: list[float]) -> float:
    """What the mean log-probability of an arm may differ by, from what rounding moved it by in correct computations."""
    return min(TIMES * (sum(move * move for move in moves) / len(moves)) ** 0.5, LIKELIHOOD)


def judge(
    free: torch.Tensor, forced: torch.Tensor, entries: list[dict[str, Any]], flips: Flips, allowed: float
) -> dict[str, Any]:
    """One arm: float32 [tokens] log-probabilities of the specification choosing freely and going on with the arm's
    choices, and what the arm saved. ``failed`` names what exceeds its limit."""
    import torch

    arm = torch.cat([entry["logprobs"] for entry in entries])
    again = [entry["repeated"] for entry in entries if "repeated" in entry]
    found = {"free": distribution(arm - free), "forced": distribution(arm - forced)}
    moved = abs(arm.double().mean().item() - free.double().mean().item())
    failed = {
        f"mean above {MEAN}": not found["free"]["mean"] <= MEAN,  # so that NaN fails too
        f"forced worst above {WORST}": not found["forced"]["largest"] <= WORST,
        "a flip beyond its tie margin": flips.total("beyond") > 0,
        f"likelihood moved by {moved:.5f}": not moved <= allowed,
    }
    return {
        **found,
        **({"repeated": distribution(torch.cat(again) - arm)} if again else {}),
        "nll": round(-arm.double().mean().item(), 5),
        "nll_repeated": round(-torch.cat(again).double().mean().item(), 5) if again else None,
        "flips": [{**row, "largest_tie": round(row["largest_tie"], 6)} for row in flips.rows.values()],
        "failed": [name for name, wrong in failed.items() if wrong],
    }


def spec_replay(model: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """Generated tokens of vLLM's default path against the specification's steps, and against no replay at all."""
    import torch

    from deepinfer_sm80.model import sensitivity

    spec = specification(model, bounded_replay=True)
    rows, same, full, order = [], [], [], []
    with torch.no_grad():
        for run in ("whole", "chunks"):
            states: list[tuple[list[int], Any]] = []
            reordered: list[tuple[list[int], Any]] = []
            for request in torch.load(out / f"generated-{run}.pt"):
                count = len(request["tokens"])
                taken = stepwise(spec, request, states).cpu()
                with sensitivity.other_order():
                    order.append(stepwise(spec, request, reordered).cpu() - taken)
                steps = taken - request["logprobs"]
                everything = spec.prompt_logprobs(request["prompt"] + request["tokens"]).cpu()[-count:]
                everything -= request["logprobs"]
                same.append(steps)
                full.append(everything)
                rows.append({
                    "run": run, "prompt": len(request["prompt"]), "cached": request["cached"],
                    "chunks": " ".join(str(s["scheduled"]) for s in request["steps"] if s["prefill"]),
                    "trimmed": sum(s["trimmed"] for s in request["steps"]),
                    "replay": distribution(steps), "no_replay": distribution(everything),
                })  # fmt: skip
    with_replay, without, noise = (distribution(torch.cat(found)) for found in (same, full, order))
    facts = {
        "device": str(spec.device), "tokens": with_replay["tokens"],
        "mean": with_replay["mean"], "largest": with_replay["largest"],
        "mean_without_replay": without["mean"], "largest_without_replay": without["largest"],
        "mean_of_other_order": noise["mean"],
    }  # fmt: skip
    ok = with_replay["mean"] <= MEAN and with_replay["mean"] < without["mean"]
    return {"ok": ok, "facts": facts, "requests": rows, "limits": {"mean": MEAN}}


def stepwise(spec: TextModel, request: dict[str, Any], states: list[tuple[list[int], Any]]) -> torch.Tensor:
    """float32 [tokens]: log-probabilities of a request's generated tokens, the specification taking vLLM's steps.

    ``states`` holds (tokens, state) of the requests before, for a prefix hit; this one is added. Raises AssertionError
    where the specification would begin elsewhere or trim another step than vLLM did.
    """
    import torch

    from deepinfer_sm80.model.replay import StepMode

    ids, first = request["prompt"] + request["tokens"], len(request["prompt"])
    state = begin(spec, ids, request["cached"], states)
    found = []
    for step in request["steps"]:
        if step["computed"] != state.length:
            raise AssertionError(f"vLLM computed {step['computed']} tokens before a step, the state {state.length}")
        mode = StepMode(step["graph"], step["padded"], replay_graphs=step["trimmed"])
        end = step["computed"] + step["scheduled"]
        done = spec.step(ids[step["computed"] : end], state, mode)
        trims = step["trimmed"] and step["prefill"] and step["scheduled"] > spec.config.sliding_window
        if trims == bool(done.kept.all()):
            raise AssertionError(f"the specification trims otherwise than vLLM in the step {step}")
        answers = min(end - first + 1, step["scheduled"])  # rows that generated tokens follow
        if answers > 0:
            spread = spec.logits(done.hidden[-answers:]).float().log_softmax(-1)
            following = torch.tensor(ids[end - answers + 1 : end + 1], device=spec.device)
            found.append(spread.gather(1, following[:, None])[:, 0])
    states.append((ids, state))
    return torch.cat(found)


def begin(spec: TextModel, ids: list[int], cached: int, states: list[tuple[list[int], Any]]) -> Any:
    """The state a request starts in: empty, or sharing ``cached`` tokens with an earlier request."""
    if not cached:
        return spec.new_state()
    for known, state in states:
        if known[:cached] == ids[:cached] and state.length >= cached:
            return state.hit(cached)
    raise AssertionError(f"no earlier request begins with the {cached} tokens that vLLM found in its cache")
