"""Whether a config will train what it means to: each suspicion a figure, before the first step.

``examine`` starts the engines of the config and looks at everything that asynchronous RL gets silently wrong; what is
cheap of it runs at every start of a run as well (:mod:`forge_async.checks`, :mod:`forge_async.doctor.at_rest`).
"""

from forge_async.doctor.finding import Finding
from forge_async.doctor.report import diagnose, examine

__all__ = ["Finding", "diagnose", "examine"]
