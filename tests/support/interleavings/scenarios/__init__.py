"""Scenarios for the parts of the SDK that several threads use at once."""

from __future__ import annotations

from interleavings.scenario import Scenario
from interleavings.scenarios.backend_support import (
    ExecutorScenario,
    SharedResourceScenario,
    SingleFlightScenario,
)
from interleavings.scenarios.compositions import StripesScenario, TiersScenario
from interleavings.scenarios.connection_pool import ConnectionPoolScenario
from interleavings.scenarios.controller import ControllerScenario, WriteBackScenario
from interleavings.scenarios.handoff import HandoffScenario
from interleavings.scenarios.host_pool import HostPoolScenario
from interleavings.scenarios.job_runner import JobRunnerScenario
from interleavings.scenarios.memory import MemoryScenario
from interleavings.scenarios.page_store import (
    BreakerScenario,
    ImpatienceScenario,
    PageStoreScenario,
)
from interleavings.scenarios.victims import VictimsScenario

SCENARIOS: dict[str, type[Scenario]] = {
    scenario.name: scenario
    for scenario in (
        HostPoolScenario,
        PageStoreScenario,
        BreakerScenario,
        ImpatienceScenario,
        ControllerScenario,
        WriteBackScenario,
        HandoffScenario,
        JobRunnerScenario,
        ExecutorScenario,
        SingleFlightScenario,
        SharedResourceScenario,
        MemoryScenario,
        VictimsScenario,
        ConnectionPoolScenario,
        TiersScenario,
        StripesScenario,
    )
}
"""All scenarios by name."""
