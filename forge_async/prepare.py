"""Make the model a run starts from, when its folder is missing: by a recipe of the model zoo, or by a warm-up run."""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import sys
from pathlib import Path
from typing import Any

from forge_async import model_zoo
from forge_async.config import ModelConfig
from forge_async.errors import ModelNotFoundError


async def ensure_model(model: ModelConfig) -> Path:
    """The folder ``model.path``, made first by ``model.prepare`` when it is not there.

    It is made in a process of its own, with the interpreter of this one, which ends with this one or when this is
    cancelled.

    Raises:
        ModelNotFoundError: the folder is missing or incomplete and nothing can make it, or its files are damaged.
    """
    await asyncio.sleep(0)  # an interruption during the imports arrives here, before anything is started
    folder = Path(model.path)
    if (folder / "config.json").is_file():
        check_model(folder)
        return folder
    if not model.prepare:
        raise ModelNotFoundError(
            f"model.path = {str(folder)!r}: no such Hugging Face folder (config.json is missing). Give the path of an "
            f"existing one, or set model.prepare to one of: sft, {', '.join(model_zoo.CATALOGUE)}."
        )
    if model.prepare == "sft":
        what = f"the warm-up {model.warmup_config}"
        command = ["-m", "forge_async.cli", "sft", model.warmup_config, f"export_path={folder}"]
    else:
        what, command = f"the recipe {model.prepare}", ["-m", "forge_async.model_zoo", model.prepare, str(folder)]
    if await run_to_end([sys.executable, *command]):
        raise ModelNotFoundError(f"model.path = {str(folder)!r}: {what} failed")
    return folder


async def run_to_end(command: list[str], grace_s: float = 10.0) -> int:
    """Run a command; its exit code. Cancelled, it ends the command: after ``grace_s`` asked, after twice that killed.

    The first wait is for a Ctrl-C, which a terminal sends to the command as well. Should this process die, the command
    gets SIGTERM from the kernel.
    """
    process = await asyncio.create_subprocess_exec(*command, preexec_fn=_end_with_parent)
    try:
        return await process.wait()
    except asyncio.CancelledError:
        for end in (process.terminate, process.kill):
            try:
                await asyncio.wait_for(process.wait(), grace_s)
                break
            except TimeoutError:
                end()
        await process.wait()
        raise
    finally:
        if process.returncode is None:  # cancelled once more
            process.kill()


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def check_model(folder: Path) -> None:
    """Look at what a model folder says about itself, without loading a weight: cheap, and before anything is spawned.

    Raises:
        ModelNotFoundError: naming the file that is missing, cut off or not what it should be.
    """
    _read_json(folder / "config.json")
    files = set(folder.glob("*.safetensors"))
    if not files:
        raise ModelNotFoundError(f"model.path = {str(folder)!r}: it has no *.safetensors file, so no weights.")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        for name in sorted(set(_read_json(index).get("weight_map", {}).values())):
            if folder / name not in files:
                raise ModelNotFoundError(f"model.path = {str(folder)!r}: {name} is missing, {index.name} names it.")
    for file in sorted(files):
        _check_safetensors(file)


def model_positions(folder: str | Path) -> int | None:
    """The longest sequence the model in ``folder`` takes, where its config says so."""
    positions = _read_json(Path(folder) / "config.json").get("max_position_embeddings")
    return positions if isinstance(positions, int) else None


def load_tokenizer(folder: str | Path) -> Any:
    """The folder's tokenizer.

    Raises:
        ModelNotFoundError: it has none, or one that transformers cannot load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever transformers and tokenizers raise about a file
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(f"model.path = {str(folder)!r}: its tokenizer cannot be loaded: {reason}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotFoundError(f"{file} holds no JSON object.")
    return content


def _check_safetensors(file: Path) -> None:
    """Header and length: 8 bytes of header size, the header in JSON, then the tensors' bytes."""
    damaged = f"{file} is damaged or cut off"
    try:
        with file.open("rb") as handle:
            length = handle.seek(0, 2)
            handle.seek(0)
            size = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(size)) if 8 + size <= length else None
        if header is None:
            raise ModelNotFoundError(f"{damaged}: its header would be longer than the file.")
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelNotFoundError(f"{damaged}: {error}") from error
    expected = 8 + size + max(ends, default=0)
    if length != expected:
        raise ModelNotFoundError(f"{damaged}: it has {length} bytes, its header asks for {expected}.")
