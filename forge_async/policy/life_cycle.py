"""The requests of one engine, from the caller's hand to its completion.

::

    accept ──▶ waiting ──admit──▶ active: vLLM has it ──collect, token by token──▶ completion
                  ▲                        │
                  └───────withdraw─────────┘   with what it has generated, or (restart) without

Keys and values. A request's cache begins at the version it was salted with, and no other version's requests read it:
requests beyond ``max_num_seqs`` wait here rather than inside vLLM, and one which has no keys and values there when the
version changes (not scheduled yet, or preempted for lack of memory) comes back and is submitted again.

Everything here belongs to the engine's thread.
"""

from __future__ import annotations

import collections
import itertools
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from forge_async.errors import DataError, ForgeError
from forge_async.policy import vllm_compat
from forge_async.policy.counters import EngineCounters
from forge_async.policy.request import Request
from forge_async.policy.updates import UpdateRules
from forge_async.types import FinishReason

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput


class Requests:
    """Waiting and active requests, and the version that labels their tokens.

    Args:
        places: how many vLLM gets at once.
        version: of the weights at the start.
    """

    def __init__(self, places: int, version: int) -> None:
        self.places, self.version = places, version
        self.counters = EngineCounters()
        self.vllm: LLMEngine
        """Set before the first request is accepted."""
        self.waiting: collections.deque[Request] = collections.deque()
        self.active: dict[str, Request] = {}
        """The caller's id -> request that vLLM has."""
        self.names: dict[str, Request] = {}
        """The caller's id -> request, waiting or active."""
        self.sampled = 0
        """Checksum of all sampled tokens, in the order in which they came."""

    def accept(self, request: Request) -> None:
        """Put a request last in line; one whose id is taken fails."""
        if request.request_id in self.names:
            fulfil(request.future, DataError(f"a request of the id {request.request_id!r} is running already"))
            return
        self.names[request.request_id] = request
        self.waiting.append(request)

    def admit(self, salt: str | None = None) -> None:
        """Hand waiting requests to vLLM while it has places. The salt keeps prefix-cache blocks of versions apart."""
        while self.waiting and len(self.active) < self.places:
            request = self.waiting.popleft()
            if request.kv_version < 0:
                self.counters.prompt_tokens += len(request.prompt)
            request.kv_version, request.submitted_at = self.version, len(request.token_ids)
            ids = [*request.prompt.tolist(), *request.token_ids]
            prompt = {"prompt_token_ids": ids, "cache_salt": salt or str(self.version)}
            try:
                request.internal_id = self.vllm.add_request(request.request_id, prompt, request.remaining_params())
            except (ValueError, TypeError) as error:  # vLLM refuses this request; the others are not concerned
                del self.names[request.request_id]
                fulfil(request.future, DataError(f"vLLM refused the request: {error}"))
                continue
            self.active[request.request_id] = request

    def step(self) -> None:
        """One forward pass; the tokens that it sampled are labelled with the live version."""
        self.counters.steps += 1
        for output in self.vllm.step():
            request = self.active.get(output.request_id)
            if request is None:
                continue
            self._append(request, output)
            if output.finished:
                self._finish(request, output)
        # Its cache would be filled anew by these weights, and by blocks of the older version which it began with.
        self._withdraw([request for request in self._without_kv() if request.kv_version != self.version])

    def abort(self, request_id: str) -> None:
        """End a request with what it has; an unknown id is fine."""
        request = self.names.pop(request_id, None)
        if request is None:
            return
        if self.active.pop(request_id, None) is not None:
            self.vllm.abort_request([request.internal_id], internal=True)
        else:
            self.waiting.remove(request)
        self.counters.abort_requested += 1
        fulfil(request.future, request.completion("abort"))

    def carry_over(self, version: int, rules: UpdateRules) -> None:
        """Treat the requests in vLLM as the mode says, between the change of weights and the next forward pass.

        Other weights of the label that the live ones have leave no keys and values, whatever the mode: nothing would
        tell them apart.
        """
        recomputes = rules.recomputes or version == self.version
        self.version = version
        empty = {request.request_id for request in self._without_kv()}
        taken = [request for request in self.active.values() if rules.withdraws or request.request_id in empty]
        if rules.withdraws or recomputes:
            for request in self.active.values():
                computed = vllm_compat.computed_tokens(self.vllm, request.internal_id)
                # What starts over is generated anew, not computed anew: those tokens are the discarded ones.
                self.counters.recomputed_tokens += min(computed, len(request.prompt)) if rules.restarts else computed
        if rules.restarts:
            self.counters.discarded_tokens += sum(request.restart() for request in taken)
        self._withdraw(taken)
        if recomputes:
            self.vllm.reset_prefix_cache(reset_running_requests=True)
            for request in self.active.values():
                request.kv_version = version

    def withdraw_unstarted(self) -> None:
        """Take back those which vLLM has not scheduled yet."""
        self._withdraw([request for request in self._without_kv() if not request.token_ids])

    def clear(self) -> list[Future[Any]]:
        """Forget all requests; returns the futures of those that are not done."""
        futures: list[Future[Any]] = [request.future for request in self.names.values()]
        for held in (self.names, self.active, self.waiting):
            held.clear()
        return futures

    def _without_kv(self) -> list[Request]:
        """Requests in vLLM which have no keys and values there: not scheduled yet, or preempted."""
        queued = vllm_compat.queued_requests(self.vllm)
        return [request for request in self.active.values() if request.internal_id in queued] if queued else []

    def _withdraw(self, requests: Sequence[Request]) -> None:
        """Take requests out of vLLM and put them first in line, with what they have generated."""
        if requests:
            self.vllm.abort_request([request.internal_id for request in requests], internal=True)
        for request in reversed(requests):
            del self.active[request.request_id]
            self.waiting.appendleft(request)

    def _append(self, request: Request, output: RequestOutput) -> None:
        new = request.append(output.outputs[0], self.version)
        self.sampled = zlib.crc32(np.asarray(new, dtype=np.int32).tobytes(), self.sampled)
        self.counters.generated_tokens += len(new)

    def _finish(self, request: Request, output: RequestOutput) -> None:
        sample = output.outputs[0]
        del self.active[request.request_id], self.names[request.request_id]
        spans = [(int(span.version), span.start, span.end) for span in sample.weight_versions or []]
        own = spans_of(request.versions[request.submitted_at :])
        if spans != own:
            fulfil(request.future, ForgeError(f"{request.request_id}: vLLM labels tokens {spans}, the loop {own}"))
        elif sample.finish_reason not in get_args(FinishReason):
            fulfil(request.future, ForgeError(f"{request.request_id}: vLLM ended it by {sample.finish_reason!r}"))
        else:
            self.counters.finished += 1
            self.counters.aborted += sample.finish_reason == "abort"
            fulfil(request.future, request.completion(sample.finish_reason, sample.stop_reason))


def fulfil(future: Future[Any], outcome: Any) -> None:
    """Set a result or an exception, unless whoever waits has cancelled."""
    if not future.running() and not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def spans_of(versions: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of equal versions as (version, start, end), end excluded."""
    spans: list[tuple[int, int, int]] = []
    for version, run in itertools.groupby(versions):
        start = spans[-1][2] if spans else 0
        spans.append((int(version), start, start + len(list(run))))
    return spans
