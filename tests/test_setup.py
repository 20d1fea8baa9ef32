"""Set-up: an obstacle ends with one clear message, an interrupted set-up starts over, a finished one is left alone."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def setup_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("forge_setup", ROOT / "tools/setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_python(path: Path, version: str) -> Path:
    """Answers the two questions that setup.sh asks: is it supported, and which version is it."""
    return script(path, f'case "$2" in *sys.exit*) exit 1;; *) echo {version};; esac')


def run_setup_sh(path: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(ROOT / "tools/setup.sh"), "/nonexistent/venv"],
        env={"PATH": path, **env},
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_a_wrong_python_is_named_with_the_remedy(tmp_path: Path) -> None:
    fake_python(tmp_path / "python3", "3.9.18")
    fake_python(tmp_path / "python", "2.7.18")
    result = run_setup_sh(str(tmp_path))
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Python 3.11 is needed" in result.stderr
    assert "Found instead: python3=3.9.18 python=2.7.18" in result.stderr
    assert "make PYTHON=/path/to/python3.11 setup" in result.stderr


def test_no_python_at_all(tmp_path: Path) -> None:
    result = run_setup_sh(str(tmp_path))
    assert result.returncode == 1
    assert "No Python was found on PATH" in result.stderr
    assert "not found" not in result.stderr.replace("No Python was found", "")  # nothing of the shell's own complaints


def test_a_chosen_python_is_the_only_one_tried(tmp_path: Path) -> None:
    chosen = fake_python(tmp_path / "mine", "3.13.0")
    script(tmp_path / "python3.11", 'case "$2" in *sys.exit*) exit 0;; esac; echo used "$@"')
    assert "mine=3.13.0" in run_setup_sh(str(tmp_path), PYTHON=str(chosen)).stderr
    result = run_setup_sh(str(tmp_path))
    assert result.returncode == 0
    assert result.stdout.startswith("used ")
    assert result.stdout.split()[1:] == [f"{ROOT}/tools/setup.py", "/nonexistent/venv"]


def test_setup_py_itself_refuses_another_python(setup_module: ModuleType) -> None:
    with pytest.raises(setup_module.SetupError, match=r"Python 3\.11 is needed, this is 3\.12\.1"):
        setup_module.check_python((3, 12, 1))
    setup_module.check_python((3, 11, 0))


def test_a_missing_compiler_or_header_is_named(setup_module: ModuleType, tmp_path: Path) -> None:
    def bin_with(*names: str) -> str:
        folder = tmp_path / "-".join(names or ("empty",))
        for name in names:
            script(folder / name, "exit 0")
        return str(folder)

    with pytest.raises(setup_module.SetupError, match=r"no C compiler was found .*gcc.*apt install g\+\+.*CC="):
        setup_module.find_compilers({"PATH": bin_with()}, tmp_path)
    with pytest.raises(setup_module.SetupError, match=r"no C\+\+ compiler was found .*CXX="):
        setup_module.find_compilers({"PATH": bin_with("cc")}, tmp_path)
    with pytest.raises(setup_module.SetupError, match=r"looked for mycc\)"):
        setup_module.find_compilers({"PATH": bin_with("cc", "c++"), "CC": "mycc -O2"}, tmp_path)
    with pytest.raises(setup_module.SetupError, match=r"Python\.h.*python3\.11-dev"):
        setup_module.find_compilers({"PATH": bin_with("cc", "c++")}, tmp_path)
    (tmp_path / "Python.h").write_text("")
    found = setup_module.find_compilers({"PATH": bin_with("cc", "c++")}, tmp_path)
    assert found == {"CC": "cc", "CXX": "c++"}


def test_unusable_or_small_shared_memory(
    setup_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(setup_module.SetupError, match=r"shared memory is not usable .*No such file.*--shm-size"):
        setup_module.check_shared_memory(tmp_path / "shm")

    class Filesystem:
        f_frsize = 4096

        def __init__(self, mib: int) -> None:
            self.f_bavail = mib * 256

    monkeypatch.setattr(os, "statvfs", lambda _: Filesystem(63))
    with pytest.raises(setup_module.SetupError, match="63 MiB free, 64 are needed"):
        setup_module.check_shared_memory(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: Filesystem(64))
    assert "64 MiB free: enough for the tiny run" in setup_module.check_shared_memory(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: Filesystem(2048))
    assert setup_module.check_shared_memory(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


NO_CPU_TORCH = """error: No solution found when resolving dependencies
  cause: Because there is no version of torch==2.13.0+cpu and you require torch==2.13.0+cpu, we can conclude that your \
requirements are unsatisfiable."""
NO_NETWORK = """error: Request failed after 3 retries in 3.7s
  cause: Failed to fetch: http://localhost:9/simple/oss-harmony/
  cause: tcp connect error"""


def test_installer_failures_are_explained(setup_module: ModuleType) -> None:
    explain = setup_module.explain_install_failure
    text = explain(NO_CPU_TORCH, "cpu")
    assert text.startswith("the package index has no CPU build of torch (torch==2.13.0+cpu). ")
    assert "UV_FIND_LINKS=/path/to/wheels make setup" in text
    assert "no version of torch==2.13.0+cpu" in text  # the installer's own words are kept
    assert explain(NO_CPU_TORCH.replace("+cpu", ""), "cuda").startswith("the package index has no CUDA build of torch")
    assert explain(NO_NETWORK, "cpu").startswith("the package index cannot be reached")
    assert explain("error: No space left on device (os error 28)", "cpu").startswith("the disk is full")
    other = NO_CPU_TORCH.replace("torch==2.13.0+cpu", "zss==1.2.0")
    assert explain(other, "cpu").startswith("the package index lacks a pinned package")
    assert explain("error: something new", "cpu").startswith("the packages could not be installed")


@pytest.fixture
def machine(setup_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A venv whose Python notes its calls and succeeds, unless ``fail`` beside it holds what uv is to print."""
    python = f"""
echo "$@" >> {tmp_path}/calls
case "$*" in
  *"config get"*) exit 1;;
  *"torch.version.cuda"*) cat {tmp_path}/torch 2>/dev/null; exit 0;;
  *"uv pip install"*) if [ -e {tmp_path}/fail ]; then cat {tmp_path}/fail; exit 1; fi;;
esac"""

    def create_venv(venv: Path) -> None:
        create_real_venv(venv)
        script(venv / "bin/python", python)
        (venv / "lib/python3.11/site-packages").mkdir(parents=True)

    create_real_venv = setup_module.create_venv
    monkeypatch.setattr(setup_module, "create_venv", create_venv)
    monkeypatch.setattr(setup_module.sys, "executable", shutil.which("true"))
    monkeypatch.setattr(setup_module, "find_compilers", lambda: {"CC": "cc", "CXX": "c++"})
    monkeypatch.setattr(setup_module, "check_disk", lambda folder, extra: None)
    monkeypatch.setattr(setup_module, "check_python", lambda: None)
    monkeypatch.setattr(setup_module, "check_shared_memory", lambda: None)
    return tmp_path


def test_a_finished_setup_is_left_alone(setup_module: ModuleType, machine: Path) -> None:
    venv = machine / "venv"
    assert setup_module.setup(venv, "cpu") is True
    calls = (machine / "calls").read_text()
    assert "--no-deps -r" in calls
    assert "requirements/cpu.txt" in calls
    assert "--no-build-isolation -e" in calls
    assert setup_module.setup(venv, "cpu") is False
    assert (machine / "calls").read_text() == calls
    assert setup_module.setup(venv, "cuda") is True  # other packages: made anew


def test_a_failed_setup_says_why_and_is_redone(setup_module: ModuleType, machine: Path) -> None:
    venv = machine / "venv"
    (machine / "fail").write_text(NO_CPU_TORCH)
    with pytest.raises(setup_module.SetupError, match="no CPU build of torch"):
        setup_module.setup(venv, "cpu")
    assert (machine / "calls").read_text().count(
        "requirements/cpu.txt"
    ) == 2  # the second time with PyTorch's own index
    (venv / "half-installed").write_text("")
    (machine / "fail").unlink()
    assert setup_module.setup(venv, "cpu") is True
    assert not (venv / "half-installed").exists()


def test_a_cpu_torch_in_the_cuda_environment_is_refused(setup_module: ModuleType, machine: Path) -> None:
    (machine / "torch").write_text("torch for cpu")
    assert setup_module.setup(machine / "venv", "cpu") is True
    with pytest.raises(
        setup_module.SetupError, match="a CPU build of torch was installed where a CUDA build is wanted"
    ):
        setup_module.setup(machine / "venv", "cuda")
    (machine / "torch").write_text("torch for 13.0")
    assert setup_module.setup(machine / "venv", "cuda") is True


def test_an_interrupted_setup_is_redone(
    setup_module: ModuleType, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["setup.py", str(machine / "venv")])
    with monkeypatch.context() as patch:
        patch.setattr(setup_module, "compile_packages", interrupted)
        assert setup_module.main() == 130
    assert setup_module.read_stamp(machine / "venv") == "unfinished"
    assert setup_module.main() == 0
    assert setup_module.read_stamp(machine / "venv") == setup_module.fingerprint("cpu")


def test_a_venv_of_somebody_else_is_not_touched(
    setup_module: ModuleType, machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (machine / "venv").mkdir()
    (machine / "venv/precious").write_text("")
    monkeypatch.setattr(sys, "argv", ["setup.py", str(machine / "venv")])
    assert setup_module.main() == 1
    assert capsys.readouterr().err.startswith(f"set-up stopped: {machine}/venv exists and was not made by this set-up.")
    assert (machine / "venv/precious").exists()


def test_changed_pins_redo_the_setup_and_changed_lint_rules_do_not(setup_module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    for name in ("pyproject.toml", "requirements/cpu.txt", "requirements/installer.txt"):
        shutil.copy(ROOT / name, tmp_path / name)

    def change(name: str, before: str, after: str) -> bool:
        old, text = setup_module.fingerprint("cpu", tmp_path), (tmp_path / name).read_text()
        assert before in text
        (tmp_path / name).write_text(text.replace(before, after))
        return setup_module.fingerprint("cpu", tmp_path) != old

    assert change("pyproject.toml", "omegaconf==", "omegaconf>=")
    assert change("pyproject.toml", "pytest-timeout==", "pytest-timeout>=")
    assert change("requirements/cpu.txt", "zss==", "zss>=")
    assert change("requirements/installer.txt", "uv==", "uv>=")
    assert not change("pyproject.toml", "line-length = 120", "line-length = 100")


def test_uv_is_told_what_pip_is_told(setup_module: ModuleType) -> None:
    settings = {"find-links": "/wheels\n/more", "extra-index-url": "https://a.example/simple\nhttps://b.example/simple"}
    env = setup_module.index_environment({"PIP_INDEX_URL": "https://c.example/simple"}, lambda n: settings.get(n, ""))
    assert env["UV_FIND_LINKS"] == "/wheels,/more"
    assert env["UV_INDEX"] == "https://a.example/simple https://b.example/simple"
    assert env["UV_DEFAULT_INDEX"] == "https://c.example/simple"
    own = {"UV_FIND_LINKS": "/mine", "UV_INDEX_URL": "https://d.example", "PIP_FIND_LINKS": "/other"}
    env = setup_module.index_environment(own, lambda n: "")
    assert env["UV_FIND_LINKS"] == "/mine"
    assert "UV_DEFAULT_INDEX" not in env


def pins(lines: list[str]) -> dict[str, str]:
    found = {}
    for entry in lines:
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)==([^ ;#]+)( ;.*)?", entry)
        assert match, f"not a plain pin: {entry!r}"
        found[match[1].lower()] = match[2]
    return found


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_the_closure_is_all_pinned_and_agrees_with_the_project(extra: str) -> None:
    """Also: no index, address or path stands in it, and nothing that compiles for minutes."""
    lines = (ROOT / f"requirements/{extra}.txt").read_text().splitlines()
    closure = pins([entry for entry in lines if not entry.startswith("#")])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"][extra]
    for name, version in pins(wanted + project["dependency-groups"]["dev"]).items():
        assert closure[name].split("+")[0] == version, name
    assert closure["torch"] == ("2.13.0+cpu" if extra == "cpu" else "2.13.0")
    assert "llama-cpp-python" not in closure
    assert extra == "cuda" or not {"torchvision", "torchaudio", "torchcodec"} & closure.keys()


def test_make_targets() -> None:
    """``make grpo``, ``make test`` and ``make check`` set up first and then run what the docs say."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")

    def planned(*arguments: str) -> list[str]:
        environ = {"PATH": os.environ["PATH"]}  # not the settings of a make that runs this test
        result = subprocess.run(
            [make, "-n", *arguments], cwd=ROOT, env=environ, text=True, capture_output=True, check=True
        )
        return [entry for entry in result.stdout.splitlines() if not entry.startswith("make")]

    assert planned("grpo") == [
        "tools/setup.sh .venv cpu",
        ".venv/bin/python apps/grpo_main.py --config configs/grpo_tiny.yaml ",
    ]
    assert planned("grpo", "ARGS=seed=1", "EXTRA=cuda", "VENV=v")[0] == "tools/setup.sh v cuda"
    assert planned("grpo", "ARGS=seed=1")[1].endswith("configs/grpo_tiny.yaml seed=1")
    assert planned("test")[1] == ".venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder"
    assert planned("test", "TESTS=tests/buffer")[1] == ".venv/bin/python -m pytest tests/buffer"
    assert planned("check")[1] == ".venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy"
    site, told = planned("site")[1:]
    assert site == ".venv/bin/python -m sphinx -W --keep-going -q -d out/doctrees docs out/site"
    assert "out/site/index.html" in told
    shown = subprocess.run([make, "help"], cwd=ROOT, env={"PATH": os.environ["PATH"]}, text=True, capture_output=True)
    assert "make site" in shown.stdout and "$" not in shown.stdout, "nothing unexpanded"
    assert "make check" in (ROOT / ".ci/run").read_text()
    assert "make test" in (ROOT / ".ci/run").read_text()
