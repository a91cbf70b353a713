"""A worker that runs `elasticrs.train` with empty steps and, for comparison, the same calls in a
bare loop.
"""

import sys
import time

from report import report

from elasticrs.train import AgentCoordinator, State, train

STEPS = int(sys.argv[1])


class Count(State):
    steps = 0

    def sync(self, *_):
        self.since = time.perf_counter_ns()


def step(state):
    if state.steps == STEPS:
        report("train", time.perf_counter_ns() - state.since)
        raise StopIteration
    state.steps += 1
    return state, None


def bare(state):
    began = time.perf_counter_ns()
    while state.steps < STEPS:
        step(state)
    report("bare", time.perf_counter_ns() - began)


bare(Count())
train(AgentCoordinator("gloo"), step, Count())
