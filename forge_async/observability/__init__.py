"""What a run shows and leaves behind: metrics, events, episodes, the live view, the plot and the summary.

Nothing here knows of engines or actors; a record comes in, a line goes out.
"""

from forge_async.observability.clocks import BusyClock, IdleMeter, RateMeter
from forge_async.observability.config import MetricsConfig
from forge_async.observability.console import Console, StepView
from forge_async.observability.episodes import EpisodeRecorder
from forge_async.observability.events import EventLog
from forge_async.observability.metrics import MetricsLogger
from forge_async.observability.plot import plot_run
from forge_async.observability.run_folder import RunFolder
from forge_async.observability.summary import Summary

__all__ = [
    "BusyClock",
    "Console",
    "EpisodeRecorder",
    "EventLog",
    "IdleMeter",
    "MetricsConfig",
    "MetricsLogger",
    "RateMeter",
    "RunFolder",
    "StepView",
    "Summary",
    "plot_run",
]
