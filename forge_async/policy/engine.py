"""An in-process vLLM engine with its own thread: it steps while there are requests, and swaps weights between steps.

```
 any thread:  submit / abort / swap / hold ──▶ inbox ──▶ engine thread:  ┌▶ take the inbox
              futures of Completion / SwapReport ◀──────────────────────│  swap weights and version label, if due
                                                                        │  admit requests, salted with the version
                                                                        └─ one forward pass; its tokens get the label
```

With tensor parallelism every rank has such an engine, and those of the other ranks repeat what rank 0's does: see
``lockstep.py``.

One thread does everything to the engine, in this order, so that a forward pass never sees two versions and a token's
label is the version whose weights computed it. When a swap is due, and what becomes of the requests that run, is the
mode's (``updates.py``); the requests themselves are in ``life_cycle.py``.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forge_async.errors import DataError, ForgeError, prefix_errors, require
from forge_async.observability.spans import SpanRing
from forge_async.policy import checkpoint, vllm_compat
from forge_async.policy.config import PolicyConfig, SamplingConfig, UpdateConfig
from forge_async.policy.counters import EngineCounters, SwapReport
from forge_async.policy.inbox import EngineDied, Inbox
from forge_async.policy.life_cycle import Requests, fulfil
from forge_async.policy.live_weights import LiveWeights, Prepared
from forge_async.policy.lockstep import Command, Lockstep, LockstepBroken
from forge_async.policy.request import Request, sampling_params
from forge_async.policy.turns import Diverged, TurnLog, TurnSchedule
from forge_async.policy.updates import RULES
from forge_async.policy.weight_plan import build_plan
from forge_async.types import Completion

if TYPE_CHECKING:
    from vllm import LLMEngine


class PolicyEngine:
    """vLLM behind thread-safe calls: :meth:`submit`, :meth:`abort`, :meth:`swap`, :meth:`hold` and :meth:`status`."""

    def __init__(self, config: PolicyConfig, model_path: str | Path, version: int = 0, seed: int = 0) -> None:
        self.config, self.model_path, self.seed = config, str(model_path), seed
        self.on_death: Callable[[BaseException], None] | None = None
        """Called in the engine thread, with the cause, when it has ended by an error after its start."""
        self.on_announced: Callable[[int], Any] | None = None
        """Called in the engine thread of ranks other than 0 with the version that rank 0 is about to swap in."""
        self.lockstep: Lockstep | None = None
        """Set by :meth:`start` where this is one of several tensor-parallel ranks."""
        self.weights: LiveWeights
        """Set by :meth:`start`."""
        self.spans = SpanRing(now=time.perf_counter)
        """Lane ``main`` is the engine thread's; ``weights`` belongs to whoever brings new ones."""
        self._vocabulary = 0
        self._native_mask = False
        """vLLM records the sampling masks itself."""
        self._engine: LLMEngine
        self._requests = Requests(config.max_num_seqs, version)
        self._rules = config.update.rules
        self._inbox = Inbox()
        self._swaps: collections.deque[tuple[int, Prepared, Future[SwapReport]]] = collections.deque()
        """Asked for and not due yet: the requests that run are ended first."""
        self._held_at = -1
        """Nothing is admitted while the live version is this one or an older one."""
        self._quiet: list[Future[None]] = []
        """Futures of :meth:`hold`."""
        self._condemned: BaseException | None = None
        """Why :meth:`condemn` ended the engine."""
        self._numbers = itertools.count()
        self._started: Future[dict[str, float]] = Future()
        self._thread = threading.Thread(target=self._main, name="policy-engine", daemon=True)

    @property
    def version(self) -> int:
        """Of the live weights; written by the engine thread only."""
        return self._requests.version

    @property
    def counters(self) -> EngineCounters:
        return self._requests.counters

    # ---- calls from any thread ----

    def use(self, turns: TurnLog | TurnSchedule) -> None:
        """Write the turns down, or repeat recorded ones; before :meth:`start`."""
        if isinstance(turns, TurnLog):
            self._inbox.log = turns
        else:
            self._inbox.schedule = turns

    def start(self) -> dict[str, float]:
        """Build the engine, prove the weight plan and warm up; returns the seconds each took. Blocks for long."""
        checkpoint.read_config(self.model_path)
        checkpoint.weight_files(self.model_path)
        self._thread.start()
        return self._started.result()

    def submit(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        sampling: SamplingConfig | None = None,
        request_id: str | None = None,
        seed: int | None = None,
    ) -> Future[Completion]:
        """Queue a request.

        Args:
            prompt_token_ids: int [P], at least one and at most ``max_model_len - 1``.
            sampling: defaults to the config's.
            request_id: must not be that of a running request; made up when None.
            seed: makes the request's own draws reproducible; None draws from the engine's generator.
        Raises:
            DataError: the prompt is empty, too long, or has ids outside of the vocabulary.
            ConfigError: the tokens that ``sampling`` keeps cannot be recorded; the message names the remedy.
            EngineDied: the engine thread has ended.
        """
        sampling = sampling or self.config.sampling
        prompt = self._checked(prompt_token_ids)
        name = request_id if request_id is not None else f"request-{next(self._numbers)}"
        params = sampling_params(sampling, seed, self._vocabulary, self._native_mask)
        request = Request(name, prompt, params, Future(), sampling.records_mask)
        self._inbox.post("submit", request)
        return request.future

    def abort(self, request_id: str) -> None:
        """End a request early: its completion has the tokens so far, finish reason ``abort``. Unknown ids are fine."""
        self._inbox.post("abort", request_id)

    def prepare(
        self,
        tensors: Mapping[str, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        digests: bool = False,
        packs: bool | None = None,
    ) -> Prepared:
        """All of a swap to ``tensors`` (HF name -> full tensor) that can be done while the engine steps.

        In any thread, one at a time; see :meth:`LiveWeights.prepare` for the arguments and errors.
        """
        step_s = self.counters.busy_s / max(self.counters.steps, 1)
        return self.weights.prepare(tensors, step_s, shapes, digests, packs)

    def swap(self, version: int, weights: Prepared | Mapping[str, torch.Tensor]) -> Future[SwapReport]:
        """Make ``weights`` live, labelled ``version``, between two forward passes.

        Tensors by HF name are prepared first, in the calling thread. They must stay valid until the future is done.
        """
        prepared = weights if isinstance(weights, Prepared) else self.prepare(weights)
        if version < self.version:
            raise ForgeError(f"version {version} is older than the live one, {self.version}: versions never decrease")
        future: Future[SwapReport] = Future()
        self._inbox.post("swap", (version, prepared, future))
        return future

    def hold(self, version: int) -> Future[None]:
        """Start no request until a version newer than ``version`` is live, or :meth:`release` is called.

        The future is done when no request runs any more; at once where a newer version is live already.
        """
        future: Future[None] = Future()
        self._inbox.post("hold", (version, future))
        return future

    def release(self) -> None:
        """End :meth:`hold` without a new version."""
        self._inbox.post("release", None)

    def set_mode(self, mode: str, kv: str) -> Future[None]:
        """Treat new versions by ``policy.update.mode`` and ``kv`` from the next turn on; the future is done then.

        Raises:
            ConfigError: there is no such mode.
        """
        with prefix_errors("policy.update"):
            UpdateConfig(mode=mode, kv=kv)
        future: Future[None] = Future()
        self._inbox.post("mode", (mode, kv, future))
        return future

    def check(self, sampling: SamplingConfig, prompt_token_ids: Sequence[int] | np.ndarray | None = None) -> None:
        """Raises what :meth:`submit` would of requests with ``sampling``, and of this prompt where one is given."""
        if prompt_token_ids is not None:
            self._checked(prompt_token_ids)
        sampling_params(sampling, None, self._vocabulary, self._native_mask)

    def _checked(self, prompt_token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The prompt, int32 [P]. Raises DataError."""
        prompt = np.asarray(prompt_token_ids, dtype=np.int32).reshape(-1)
        limit = self.config.max_model_len - 1
        if not 1 <= len(prompt) <= limit:
            raise DataError(
                f"the prompt has {len(prompt)} tokens, allowed are 1 to {limit} "
                f"(policy.max_model_len {self.config.max_model_len} less one to generate)"
            )
        if prompt.min() < 0 or prompt.max() >= self._vocabulary:
            raise DataError(
                f"the prompt's token ids must be in 0..{self._vocabulary - 1}, found {prompt.min()}..{prompt.max()}"
            )
        return prompt

    def announce(self, version: int) -> None:
        """Tell the other ranks to pull ``version`` and swap it as this one will."""
        if self.lockstep is not None:
            self._inbox.post("announce", version)

    def status(self) -> dict[str, Any]:
        """A snapshot of counters and queue lengths."""
        idle_since = self._inbox.idle_since
        sums = {name: getattr(self.counters, name) for name in self.counters.__dataclass_fields__}
        sums["swap_ms"] = list(self.counters.swap_ms)
        if idle_since is not None:
            waited = time.perf_counter() - idle_since
            sums["idle_s"] += waited
            sums["held_s"] += waited if self._requests.waiting else 0.0
        return sums | {
            "version": self.version,
            "running": len(self._requests.active),
            "waiting": len(self._requests.waiting) + self._inbox.submitted(),
            "draining": bool(self._swaps),
            "held": self._held,
            "failed": None if self._inbox.failure is None else repr(self._inbox.failure),
            "turn": self._inbox.turn,
            "lacks": self._inbox.lacks,
        }

    def stop(self) -> None:
        """End the thread after the current forward pass; unfinished requests fail. Safe to call twice."""
        self._inbox.stop()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def condemn(self, cause: BaseException) -> None:
        """End as :meth:`stop` does, because of ``cause``: requests running and to come fail with it."""
        self._condemned = cause
        self.stop()

    # ---- the engine thread ----

    def _main(self) -> None:
        """Consumes the inbox, produces results of futures; waits only while there is nothing to do; ends by stop()."""
        try:
            self._started.set_result(self._build())
        except BaseException as error:
            self._started.set_exception(error)
            self._fail(error)
            return
        try:
            while self._take_inbox():
                self._turn()
        except BaseException as error:
            if self.on_death is not None:  # first: what ends a process answers no request, so that others get them
                self.on_death(error)
            self._fail(error)
        else:
            self._fail(self._condemned or EngineDied("the engine was stopped"))

    def _turn(self) -> None:
        """Swap if that is due, admit if that is allowed, and make a forward pass if there is a request to run."""
        self._update()
        began = time.perf_counter()
        if self._held or self._swaps:
            self._requests.withdraw_unstarted()
        else:
            self._requests.admit()
        if self._requests.active:
            self._requests.step()
            ended = time.perf_counter()
            self.counters.busy_s += ended - began
            self.spans.note("main", "generate", began, ended, version=self.version)
        if not (self._requests.active and self._held):
            for future in self._quiet:
                fulfil(future, None)
            self._quiet.clear()

    def _build(self) -> dict[str, float]:
        config, began = self.config, time.perf_counter()
        ranks = config.tensor_parallel_size
        heads = checkpoint.read_config(self.model_path)["num_attention_heads"]
        assert isinstance(heads, int)
        require(heads % ranks == 0, "tensor_parallel_size", ranks, f"a divisor of num_attention_heads ({heads})")
        self._native_mask = config.sampling.records_mask and vllm_compat.has_native_mask()
        vocabulary = checkpoint.read_config(self.model_path)["vocab_size"]
        assert isinstance(vocabulary, int)
        vllm_compat.mask_params(config.sampling, vocabulary, self._native_mask)  # refused before anything is loaded
        self._engine = self._requests.vllm = vllm_compat.build_engine(
            return_sampling_mask=self._native_mask,
            model=self.model_path,
            dtype=config.dtype,
            enforce_eager=config.enforce_eager,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30) // ranks,
            tensor_parallel_size=ranks,
            distributed_executor_backend="external_launcher" if ranks > 1 else None,
            seed=self.seed,
        )
        if ranks > 1:
            self.lockstep = Lockstep()
        built = time.perf_counter()
        model = vllm_compat.model_of(self._engine)
        self.weights = LiveWeights(
            model,
            build_plan(model, self.model_path, whole=ranks == 1),
            config.update,
            compiled=not self._engine.model_config.enforce_eager,
            rows=min(32, config.max_num_seqs),
        )
        planned = time.perf_counter()
        self._vocabulary = self._engine.model_config.get_vocab_size()
        self._engine.set_weight_version(str(self.version))
        self._warm_up()
        return {"build_s": built - began, "plan_s": planned - built, "warm_up_s": time.perf_counter() - planned}

    def _warm_up(self) -> None:
        """A few short requests through the whole path; the first forward passes of a process are seconds slow."""
        sampling = SamplingConfig(max_tokens=4, ignore_eos=True)
        for i in range(min(4, self.config.max_num_seqs)):
            prompt = np.full(min(8, self.config.max_model_len - 4) or 1, i % self._vocabulary, dtype=np.int32)
            params = sampling_params(sampling, None, self._vocabulary, self._native_mask)
            self._requests.accept(Request(f"warm-up-{i}", prompt, params, Future()))
        while self._requests.names:
            self._requests.admit(salt="warm-up")
            self._requests.step()
        self._requests.counters, self._requests.sampled = EngineCounters(), 0

    def _take_inbox(self) -> bool:
        """Take what was posted, waiting while there is no request to run; False when stopped."""
        if self.lockstep is not None and self.lockstep.rank > 0:
            posted = self.lockstep.receive(self._own_swap, self._requests.sampled)
        else:
            posted = self._await_inbox()
            if self.lockstep is not None:
                self.lockstep.send(posted, self._requests.sampled)
        if posted is None:
            return False
        for kind, payload in posted:
            if kind == "submit":
                self._requests.accept(payload)
            elif kind == "abort":
                self._requests.abort(payload)
            elif kind == "swap":
                self._swaps.append(payload)
            elif kind == "hold":
                self._held_at = max(self._held_at, payload[0])
                self._quiet.append(payload[1])
            elif kind == "release":
                self._held_at = -1
            elif kind == "mode":
                self._rules = RULES[payload[:2]]
                fulfil(payload[2], None)
            elif self.on_announced is not None:
                self.on_announced(payload)
        return True

    def _await_inbox(self) -> list[Command] | None:
        """What was posted; waits while there is neither that nor a request to run. None when stopped."""
        began = time.perf_counter()
        posted = self._inbox.take(self._runnable, self._requests.sampled)
        if not self._requests.active:
            waited = time.perf_counter() - began
            self.counters.idle_s += waited
            self.counters.held_s += waited if self._requests.waiting else 0.0
            self.spans.note("main", "hold" if self._requests.waiting else "wait", began, began + waited)
        return posted

    def _own_swap(self, version: int) -> Any:
        """On ranks other than 0: this rank's own swap to ``version``, which the actor posts when it has pulled it."""
        command = self._inbox.take_one()
        if command is not None and command[1][0] == version:
            return command[1]
        raise LockstepBroken(f"rank 0 swaps to version {version}, which this rank does not have")

    @property
    def _runnable(self) -> bool:
        """There is something to do without a further command."""
        return bool(self._requests.active or self._swaps or (self._requests.waiting and not self._held))

    @property
    def _held(self) -> bool:
        return self.version <= self._held_at

    def _update(self) -> None:
        """Carry out the swaps that are due. Nobody cancels one that has begun: its tensors stay valid then."""
        while self._swaps and not (self._requests.active and self._rules.drains):
            version, prepared, future = self._swaps[0]
            if future.set_running_or_notify_cancel():
                self._swap(version, prepared, future)
            self._swaps.popleft()

    def _swap(self, version: int, prepared: Prepared, future: Future[SwapReport]) -> None:
        """Weights and label change together; the update was checked before, so that nothing fails half-way."""
        began = time.perf_counter()
        previous = self.version
        self.weights.apply(prepared)
        self._engine.set_weight_version(str(version))
        in_flight = len(self._requests.active)
        self._requests.carry_over(version, self._rules)
        pause = time.perf_counter() - began
        self.counters.swaps += 1
        self.counters.swaps_in_flight += in_flight > 0
        self.counters.swap_ms = [pause * 1e3]
        self.counters.busy_s += pause
        self.spans.note("main", "swap", began, began + pause, version=version, in_flight=in_flight)
        fulfil(future, SwapReport(version, previous, pause * 1e3, in_flight, self.weights.plan.nbytes))

    def _fail(self, error: BaseException) -> None:
        posted = self._inbox.close(error)
        died = error
        if not isinstance(error, Diverged):
            died = EngineDied(f"the generator's engine ended: {type(error).__name__}: {error}")
            died.__cause__ = error
        futures = self._requests.clear()
        futures += [payload.future for kind, payload in posted if kind == "submit"]
        futures += [swap[2] for swap in self._swaps]
        futures += [payload[-1] for kind, payload in posted if kind in ("swap", "hold", "mode")]
        futures += self._quiet
        for held in (self._swaps, self._quiet):
            held.clear()
        for future in futures:
            fulfil(future, died)
