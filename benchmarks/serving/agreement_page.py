"""The tables of docs/serving-proof.md about agreement with the specification."""

from __future__ import annotations

from typing import Any

FULL = """
## Agreement with the specification

Log-probabilities of prompt tokens, |difference| to `spec`. Free: every side chooses its experts and compressed rows
itself; allowed is a mean of {mean}. Forced: `spec` goes on with what the arm chose; allowed is {worst} for any token.
Repeated: the arm's second run against its first. Other order: `spec` as an arm, with {reordered} summed from the
last column to the first."""
FIRST = "every float32 product (not those in bfloat16)"  # what runs that do not say so had reordered

FLIPS = """
Choices that `spec` would have made otherwise in the same state, and the largest error of a score that explains one.
Allowed are {experts} for experts (scores with bias) and {rows} for rows (parts of the query's largest index score).
Surplus: queries that saw rows beyond their candidates, which counts as no tie."""

REPLAY = """
## Generated tokens, bounded replay on

Log-probabilities of the tokens that vLLM generated on its default path, |difference| to `spec` taking the same steps
(chunks, trimmed steps, prefix hit), and to `spec` computing every layer for every token. Allowed is a mean of {mean}
over all requests."""


def full(result: dict[str, Any]) -> list[str]:
    """Lines of the section about ``spec-full``; none without a result."""
    if "arms" not in result:
        return []
    lines = [*FULL.format(**{"reordered": FIRST, **result["limits"]}).splitlines(), ""]
    lines += ["| what | tokens | mean | p50 | p90 | p99 | largest |", "|---|---|---|---|---|---|---|"]
    for arm, row in result["arms"].items():
        lines += [_line(f"{arm}, {kind}", row[kind]) for kind in ("free", "forced", "repeated") if kind in row]
    nll = [f"spec {result['nll']}"]
    for arm, row in result["arms"].items():
        repeated = "" if row["nll_repeated"] is None else f" (repeated {row['nll_repeated']})"
        nll.append(f"{arm} {row['nll']}{repeated}")
    limits = result["limits"]
    lines += [
        "",
        f"Mean negative log-likelihood: {', '.join(nll)}.",
        _likelihood(limits),
    ]
    lines += FLIPS.format(**result["limits"]["ties"]).splitlines()
    lines += ["", "| arm | choice | layer | queries | flips | largest tie | beyond | surplus |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for arm, row in result["arms"].items():
        for flip in row["flips"]:
            if flip["flips"]:
                values = [flip[k] for k in ("kind", "layer", "queries", "flips", "largest_tie", "beyond", "surplus")]
                lines.append(f"| {arm} | {' | '.join(map(str, values))} |")
        quiet = sum(not flip["flips"] for flip in row["flips"])
        lines.append(f"| {arm} | all others | {quiet} layers | | 0 | | | |")
    return lines


def _likelihood(limits: dict[str, Any]) -> str:
    if "moves" not in limits:  # results of before 2026-11-30
        return (
            f"An arm may differ from spec by {limits['nll']}, {limits['errors']} standard errors of what another order "
            "does."
        )
    moves = ", ".join(f"{name} {move:+}" for name, move in limits["moves"].items())
    return (
        f"An arm may differ from spec by {limits['nll']}: {limits['times']} times the root mean square of what correct "
        f"computations differ by ({moves}), and no more than a fifth of the mean's limit."
    )


def replay(result: dict[str, Any]) -> list[str]:
    """Lines of the section about ``spec-replay``; none without a result."""
    if "requests" not in result:
        return []
    lines = [*REPLAY.format(**result["limits"]).splitlines(), ""]
    lines += ["| run | prompt | cached | chunks | trimmed | mean | largest | mean, no replay | largest, no replay |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for row in result["requests"]:
        values = [row[k] for k in ("run", "prompt", "cached", "chunks", "trimmed")]
        values += [row[k][v] for k in ("replay", "no_replay") for v in ("mean", "largest")]
        lines.append(f"| {' | '.join(map(str, values))} |")
    return lines


def _line(name: str, found: dict[str, Any]) -> str:
    return f"| {name} | {' | '.join(str(found[k]) for k in ('tokens', 'mean', 'p50', 'p90', 'p99', 'largest'))} |"
