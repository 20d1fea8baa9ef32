"""Makes the virtual environment: checks the machine, installs the pinned packages, stamps the result.

``python3.11 tools/setup.py VENV [cpu|cuda]``. Only the standard library is used. Nothing is done when the stamp in VENV
matches the pins, so that every make target can call it. The stamp is written last: an interrupted set-up starts over.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = ".forge-setup"
"""In the venv: the digest of the inputs it was made from, or UNFINISHED."""
UNFINISHED = "unfinished"
RARELY_IMPORTED = (
    r"/(tests?|_pytest|mypyc?|hypothesis|pip|setuptools|wandb|sentry_sdk|networkx|fontTools|pygments/lexers|supervisor|mcp)/"
    r"|/transformers/models/(?!auto|llama/|qwen3/|qwen3_moe/)|/vllm/model_executor/models/(?!llama|qwen|interfaces)"
    r"|/(openai|anthropic)/types/|/transformers/cli/|/vllm/benchmarks/|/pandas/plotting/"
)
"""Modules that are not byte-compiled at set-up, but on their first import: half of all lines."""
SUPPORTED_PYTHON = (3, 11)
DISK_GIB = {"cpu": 8.0, "cuda": 20.0}
"""Free space wanted before the packages are installed."""
SHARED_MEMORY_MIB = 64
"""The tiny run's weight versions fit in this; SmolLM2-135M wants about 2048."""


class SetupError(Exception):
    """Set-up cannot go on; the message says why and what to do."""


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> None:
    """The pinned wheels are built for one Python."""
    if tuple(version[:2]) != SUPPORTED_PYTHON:
        raise SetupError(
            f"Python 3.11 is needed, this is {'.'.join(map(str, version[:3]))}: the pinned torch, vLLM and Monarch "
            "wheels are made for it. Name another one: make PYTHON=/path/to/python3.11 setup"
        )


def find_compilers(environ: Mapping[str, str] = os.environ, include: Path | None = None) -> dict[str, str]:
    """CC and CXX: one small dependency (pycosat) comes as C source, and torch and vLLM compile C++ kernels as they run.

    Args:
        environ: where CC, CXX and PATH are looked up.
        include: folder of Python's headers; that of the running Python by default.
    """
    found = {}
    own = {"CC": sysconfig.get_config_var("CC") or "", "CXX": sysconfig.get_config_var("CXX") or ""}
    for variable, names in {"CC": ["gcc", "cc", "clang"], "CXX": ["g++", "c++", "clang++"]}.items():
        wanted = [environ[variable]] if environ.get(variable) else [own[variable], *names]
        wanted = [name.split()[0] for name in wanted if name]
        compiler = next((name for name in wanted if shutil.which(name, path=environ.get("PATH"))), None)
        if compiler is None:
            language = "C" if variable == "CC" else "C++"
            raise SetupError(
                f"no {language} compiler was found (looked for {', '.join(wanted)}): one dependency is built from "
                "source, and torch and vLLM compile kernels as they run. Install gcc and g++ (apt install g++) or name "
                f"one: {variable}=/path/to/compiler make setup"
            )
        found[variable] = compiler
    headers = include or Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        raise SetupError(
            f"Python's headers are missing ({headers}/Python.h): one small dependency is built from source. "
            "Install them (apt install python3.11-dev)."
        )
    return found


def check_shared_memory(folder: Path = Path("/dev/shm")) -> str | None:
    """Weights travel between processes through POSIX shared memory. Returns a warning, or None."""
    remedy = "Mount it (mount -t tmpfs -o size=4g tmpfs /dev/shm); in Docker: docker run --shm-size=4g (or --ipc=host)"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="forge-setup-"):
            pass
    except OSError as error:
        raise SetupError(
            f"shared memory is not usable ({folder}: {error.strerror or error}): trainer and generators exchange "
            f"weights through it. {remedy}."
        ) from error
    stats = os.statvfs(folder)
    free_mib = stats.f_bavail * stats.f_frsize // 2**20
    if free_mib < SHARED_MEMORY_MIB:
        raise SetupError(f"shared memory has {free_mib} MiB free, {SHARED_MEMORY_MIB} are needed. {remedy}.")
    if free_mib < 2048:
        return f"shared memory has {free_mib} MiB free: enough for the tiny run, SmolLM2-135M wants 2048. {remedy}."
    return None


def check_disk(folder: Path, extra: str) -> None:
    free = shutil.disk_usage(folder).free / 2**30
    if free < DISK_GIB[extra]:
        raise SetupError(
            f"{folder} has {free:.1f} GiB free, the {extra} packages need {DISK_GIB[extra]:.0f}. Free some space."
        )


def fingerprint(extra: str, root: Path = ROOT) -> str:
    """Digest of everything the environment is made from: another digest means another set-up."""
    digest = hashlib.sha256(f"{extra} {sys.version_info[:2]}".encode())
    import tomllib  # new in 3.11: an older Python must reach check_python's message

    project = tomllib.loads((root / "pyproject.toml").read_text())
    parts = [project.get(table) for table in ("project", "build-system", "dependency-groups")]
    digest.update(json.dumps([*parts, project.get("tool", {}).get("setuptools")], sort_keys=True).encode())
    for name in (f"requirements/{extra}.txt", "requirements/installer.txt"):
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    digest.update(str(root).encode())  # the project itself is installed by its path
    return digest.hexdigest()


def read_stamp(venv: Path) -> str | None:
    """The venv's stamp, or None where it has none."""
    try:
        return (venv / STAMP).read_text().strip()
    except FileNotFoundError:
        return None


def write_stamp(venv: Path, text: str) -> None:
    """Atomic, so that an interrupted write cannot look finished."""
    temporary = venv / f"{STAMP}.{os.getpid()}"
    temporary.write_text(text + "\n")
    temporary.replace(venv / STAMP)


def index_environment(environ: Mapping[str, str], pip_setting: Callable[[str], str]) -> dict[str, str]:
    """The environment for uv: what pip is told about where packages are, in uv's words.

    Args:
        environ: the caller's environment; uv's own variables in it win.
        pip_setting: value of a pip setting such as ``find-links``, or "".
    """
    result = dict(environ)

    def hand_on(target: str, variable: str, setting: str, separator: str) -> None:
        value = environ.get(variable) or pip_setting(setting)
        if value and not environ.get(target):
            result[target] = separator.join(value.split())

    hand_on("UV_FIND_LINKS", "PIP_FIND_LINKS", "find-links", ",")
    if not any(environ.get(name) for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL")):
        hand_on("UV_DEFAULT_INDEX", "PIP_INDEX_URL", "index-url", " ")
    if not any(environ.get(name) for name in ("UV_INDEX", "UV_EXTRA_INDEX_URL")):
        hand_on("UV_INDEX", "PIP_EXTRA_INDEX_URL", "extra-index-url", " ")
    if environ.get("PIP_CERT") and not environ.get("SSL_CERT_FILE"):
        result["SSL_CERT_FILE"] = environ["PIP_CERT"]
    result.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # every version is pinned: take it wherever it is
    result.setdefault("UV_HTTP_TIMEOUT", environ.get("PIP_DEFAULT_TIMEOUT", "180"))
    result.pop("VIRTUAL_ENV", None)
    return result


def explain_install_failure(output: str, extra: str) -> str:
    """One message out of what the installer printed."""
    tail = "\n".join("    " + line for line in output.strip().splitlines()[-12:])
    lowered = output.lower()
    if "torch==" in lowered and ("no version of torch" in lowered or "torch was not found" in lowered):
        text = (
            "the package index has no CPU build of torch (torch==2.13.0+cpu)"
            if extra == "cpu"
            else "the package index has no CUDA build of torch (torch==2.13.0)"
        )
        text += (
            ". Let the index be reached that PyTorch publishes it on, or name a folder or page with its wheel: "
            "UV_FIND_LINKS=/path/to/wheels make setup"
        )
    elif "no space left" in lowered:
        text = "the disk is full. Free some space and run make setup again"
    elif any(word in lowered for word in ("connect", "dns", "timed out", "offline", "failed to fetch")):
        text = "the package index cannot be reached. Check the network and the proxy, then run make setup again"
    elif "no solution found" in lowered:
        text = "the package index lacks a pinned package"
    else:
        text = "the packages could not be installed"
    return f"{text}.\n  The installer's last lines:\n{tail}"


def call(command: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run ``command``, with its standard output and error together as text."""
    return subprocess.run(
        command, env=dict(env), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )


def show(command: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """As :func:`call`, printing the lines that tell of progress while the command runs."""
    lines: list[str] = []
    with subprocess.Popen(
        command, env=dict(env), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith(("Resolved", "Prepared", "Installed", "Downloading", "Downloaded", "   Building")):
                print(f"  {line.strip()}", flush=True)
    return subprocess.CompletedProcess(command, process.returncode, "".join(lines))


def create_venv(venv: Path) -> None:
    """A fresh venv with pip, whatever was there before but the stamp, which keeps saying that it is unfinished."""
    for entry in venv.iterdir():
        if entry.name == STAMP:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    result = call([sys.executable, "-m", "venv", str(venv)], os.environ)
    if result.returncode:
        raise SetupError(
            f"the virtual environment {venv} could not be made (on Debian and Ubuntu: apt install python3.11-venv).\n"
            f"    {result.stdout.strip()}"
        )


def install(venv: Path, extra: str, compilers: Mapping[str, str]) -> None:
    """Everything in requirements/<extra>.txt, then the project itself."""
    python = str(venv / "bin" / "python")

    def pip_setting(name: str) -> str:
        for scope in ("global", "install"):
            result = call([python, "-m", "pip", "config", "get", f"{scope}.{name}"], os.environ)
            if result.returncode == 0:
                return result.stdout.strip()
        return ""

    result = call(
        [python, "-m", "pip", "install", "--quiet", "-r", str(ROOT / "requirements/installer.txt")], os.environ
    )
    if result.returncode:
        raise SetupError(explain_install_failure(result.stdout, extra).replace("The installer's", "pip's"))
    env = {**index_environment(os.environ, pip_setting), **compilers}
    # The list is the whole closure: nothing is resolved, so no package's own pins can disagree.
    base = [python, "-m", "uv", "pip", "install", "--python", python, "--no-deps"]
    command = [*base, "-r", str(ROOT / "requirements" / f"{extra}.txt")]
    result = show(command, env)
    if result.returncode and extra == "cpu" and "torch" in result.stdout and "UV_TORCH_BACKEND" not in env:
        second = show(command, {**env, "UV_TORCH_BACKEND": "cpu"})  # the index PyTorch publishes its CPU builds on
        result = second if second.returncode == 0 else result
    if result.returncode:
        raise SetupError(explain_install_failure(result.stdout, extra))
    result = call([*base, "--no-build-isolation", "-e", str(ROOT)], env)
    if result.returncode:
        raise SetupError(explain_install_failure(result.stdout, extra))


def compile_packages(venv: Path) -> None:
    """Byte-compile what the engines import: it halves their start. A file that cannot be compiled is no error here."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    packages = str(next((venv / "lib").glob("python3*")) / "site-packages")
    workers = str(len(os.sched_getaffinity(0)))
    command = [str(venv / "bin" / "python"), "-m", "compileall", "-qq", "-j", workers, "-x", RARELY_IMPORTED, packages]
    call(command, environ)


def check_installed(venv: Path, extra: str) -> None:
    """The packages load on this machine, and torch is the build that was asked for."""
    code = "import torch, monarch.actor, forge_async.types; print('torch for', torch.version.cuda or 'cpu')"
    result = call([str(venv / "bin" / "python"), "-c", code], os.environ)
    if result.returncode:
        raise SetupError("the installed packages do not load on this machine:\n    " + result.stdout.strip()[-800:])
    if extra == "cuda" and "torch for cpu" in result.stdout:
        raise SetupError(
            "a CPU build of torch was installed where a CUDA build is wanted: a folder or index that comes first "
            "(UV_FIND_LINKS, PIP_FIND_LINKS or pip's settings) offers it. Leave that one out and run make setup again."
        )


def setup(venv: Path, extra: str) -> bool:
    """Make ``venv`` match the pins. Returns False when there was nothing to do."""
    check_python()
    wanted = fingerprint(extra)
    if read_stamp(venv) == wanted:
        return False
    with open(__file__) as lock:  # two make targets at once: the second waits, then finds the work done
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = read_stamp(venv)
        if stamp == wanted:
            return False
        if stamp is None and venv.exists() and any(venv.iterdir()):
            raise SetupError(
                f"{venv} exists and was not made by this set-up. Remove it, or choose another "
                "place: make VENV=.venv-forge setup"
            )
        compilers = find_compilers()
        warning = check_shared_memory()
        if warning:
            print(f"warning: {warning}", flush=True)
        check_disk(venv.parent, extra)
        started = time.monotonic()
        print(
            f"set-up: installing the pinned packages ({extra}) into {venv}: 5 GB, about a minute once downloaded",
            flush=True,
        )
        venv.mkdir(parents=True, exist_ok=True)
        write_stamp(venv, UNFINISHED)
        create_venv(venv)
        install(venv, extra, compilers)
        print("  Byte-compiling what the engines import: once now, so that every start takes half as long", flush=True)
        compile_packages(venv)
        check_installed(venv, extra)
        write_stamp(venv, wanted)
        print(f"set-up: done in {time.monotonic() - started:.0f} s", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path)
    parser.add_argument("extra", nargs="?", default="cpu", choices=sorted(DISK_GIB))
    arguments = parser.parse_args()
    try:
        setup(arguments.venv.absolute(), arguments.extra)
    except SetupError as error:
        print(f"set-up stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up interrupted: the next make starts it over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
