"""A device on the CPU whose clock is a list: every piece of work costs what the test says, and its order is kept."""

from deepinfer_sm80.bench.ceilings import Ceilings
from deepinfer_sm80.bench.gpu import Timed


class FakeDevice:
    """Replays run the calls for real, so that the gate has results to judge; ``costs`` are microseconds by lane."""

    kind, name, sms, driver, capability = "cpu", "NVIDIA Test 9000", 4, "1.2.3", (9, 0)

    def __init__(self, costs=(10.0,), l2_bytes=1 << 10, memory=1 << 30):
        self.costs, self.l2_bytes, self.memory = list(costs), l2_bytes, memory
        self.lanes, self.order, self.limited = 0, [], []

    def free_bytes(self):
        return self.memory

    def capture(self, calls):
        return self._timed(calls, "graph")

    def eager(self, calls):
        return self._timed(calls, "eager")

    def _timed(self, calls, how):
        lane = self.lanes
        self.lanes += 1
        results = (calls[0](), calls[-1]())

        def elapsed_us():
            calls[0](), calls[-1]()
            self.order.append((lane, how))
            return self.costs[lane % len(self.costs)] * len(calls)

        return Timed(elapsed_us, results, 1.0)

    def alive(self):
        return True

    def prepare(self, operators):
        return "nothing compiled"

    def ceilings(self):
        return Ceilings(copy=1e12, dot=1e14)

    def limit_occupancy(self, keys, capability):
        self.limited.append((tuple(keys), capability))
        return f"sm_{capability[0]}{capability[1]}"
