"""Benchmarks of the operators: a row exists only where the result was checked on the tensors that were timed.

``cases`` are the sizes, ``providers`` what is compared, ``gate`` the check, ``gpu`` the device, ``measure`` the run,
``rows`` the records and the summary that charts are drawn from. The rules are in docs/6-benchmarking.md.
"""
