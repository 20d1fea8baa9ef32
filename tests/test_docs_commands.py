"""Every command of README, docs/ and the command line's help does what it says.

Each is carried out here as far as that is cheap: in a folder with made-up runs and the files that the pages show. What
starts engines or takes minutes is understood here, settings and all, and names the test that does the rest. A command
that no row of ``TABLE`` knows fails.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
import uvicorn
from typer.testing import CliRunner

from forge_async import cli, model_zoo
from forge_async.commands.generate import settings_of
from forge_async.config import Config, load_config
from forge_async.dashboard.config import PORT
from forge_async.observability import RunFolder
from forge_async.testing.run_folder import write_run
from tests.pages import BLOCKS, ROOT, Command, commands, functions_of

RUNS = ("grpo_tiny", "grpo_tiny-2", "grpo_smollm2", "first", "second", "big")
PLACEHOLDERS = {
    "CONFIG": "configs/grpo_tiny.yaml",
    **{"RUN": "runs/first", "RUN|MODEL": "runs/first", "PROMPT": "101", "COMMAND": "episodes", "N": "1"},
    **{"FILE": "file.png", "FOLDER": "folder", "key=value": "seed=1"},
}
"""What stands for something else in usage lines; brackets and dots around what may be left out are dropped."""

Do = Callable[[list[str]], None]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: the repository's, runs, and what the pages tell to write."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("configs", "apps", "benchmarks", "tools", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    for name in RUNS:
        write_run(folder / "runs" / name, steps=3, episodes_per_step=2)
    for block in BLOCKS:
        if block.file:
            (folder / block.file).write_text(block.text)
    return folder


@pytest.fixture(autouse=True)
def place(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(prepared)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "path", [str(prepared), *sys.path])
    return prepared


# ---- how each kind of command is carried out ----


def invoke(words: list[str]) -> tuple[int, str]:
    """Exit code and all output of ``forge-async`` with these words."""
    result = CliRunner().invoke(cli.app, words[1:], prog_name="forge-async", env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def succeeds(words: list[str]) -> None:
    code, output = invoke(words)
    assert code == 0, output


def shows_its_help(words: list[str]) -> None:
    code, output = invoke(words)
    assert code == 0
    assert "Usage: forge-async" in output


def is_a_command(words: list[str]) -> None:
    """A name in running text."""
    assert words[1] in typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


def prints_its_config(words: list[str]) -> None:
    """The command as it is, stopped where it would start processes: after files, overrides and checks."""
    succeeds([*words, "--print-config"])


def app_prints_its_config(words: list[str]) -> None:
    async def never(config: Config) -> None:
        raise AssertionError("--print-config starts nothing")

    assert cli.run_app(never, Config, "configs/grpo_tiny.yaml", "", [*words[2:], "--print-config"]) == 0


def generate_is_understood(words: list[str]) -> None:
    command = typer.main.get_command(cli.app).commands["generate"]  # type: ignore[attr-defined]
    taken = command.make_context("generate", words[2:]).params
    settings_of(RunFolder(Path("runs/first")), taken["overrides"] or [])
    assert taken["n"] >= 1 and taken["prompt"]


def replays_what_is_recorded(words: list[str]) -> None:
    code, output = invoke(words)
    assert code == 1 and "schedule/loop.jsonl" in output, "a made-up run has no schedule, and that is all that is wrong"


def exports_what_was_saved(words: list[str]) -> None:
    code, output = invoke(words)
    assert code == 1 and "the run saved no checkpoint" in output, (
        "a made-up run has none, and that is all that is wrong"
    )


def serves_the_page(words: list[str]) -> None:
    """In a thread, until the page has been fetched from the address that was printed."""
    if "--port" in words:
        words[words.index("--port") + 1] = str(free_port())
    servers: list[uvicorn.Server] = []
    run = uvicorn.Server.run
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.Server, "run", lambda self, sockets: (servers.append(self), run(self, sockets)))
        patch.setattr("builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words))))
        thread = threading.Thread(target=cli.main, args=(words[1:],))
        thread.start()
        deadline = time.monotonic() + 20
        while not (servers and servers[0].started) and time.monotonic() < deadline:
            time.sleep(0.01)
    address = printed[0].split()[3].replace(socket.gethostname(), "127.0.0.1")
    cookies = urllib.request.HTTPCookieProcessor()  # a token goes on as a cookie
    try:
        with urllib.request.build_opener(cookies).open(address, timeout=10) as answer:
            assert b"forge_async" in answer.read()
    finally:
        servers[0].should_exit = True
        thread.join(20)


def installs_completion(words: list[str]) -> None:
    home = Path("home").absolute()
    home.mkdir()
    line = f"{sys.executable} -m forge_async.cli {' '.join(words[1:])}; exit $?"
    environ = os.environ | {"HOME": str(home)}
    result = subprocess.run(["bash", "-c", line], env=environ, text=True, capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert list(home.rglob("*.sh"))


def makes(words: list[str]) -> None:
    """The plan of it, and of what it calls; help is shown."""
    make = shutil.which("make")
    assert make is not None
    command = [make, *(() if "help" in words else ("-n",)), *words[1:]]
    environ = {"PATH": os.environ["PATH"]}  # not the settings of a make that runs this test
    planned = subprocess.run(command, env=environ, text=True, check=True, capture_output=True).stdout
    for line in planned.splitlines():
        if "apps/grpo_main.py" in line:
            app_prints_its_config(Command("Makefile", line, inline=False).words)


def runs(words: list[str]) -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words[1:]], env=environ, check=True, capture_output=True, timeout=60)


def answers_await(words: list[str]) -> None:
    script = "import asyncio\nprint(await asyncio.sleep(0, 'awaited'))\n"
    result = subprocess.run([sys.executable, *words[1:]], input=script, text=True, check=True, capture_output=True)
    assert "awaited" in result.stdout


def makes_the_model(words: list[str]) -> None:
    assert model_zoo.main(words[3:]) == 0
    assert (Path(words[4]) / "config.json").exists()


class Understood(Exception):
    """A script has taken its arguments."""


def is_understood(words: list[str]) -> None:
    """A script as it is, stopped once its parser has taken the words; a config that it names loads."""

    def stopping(parse: Callable[..., argparse.Namespace]) -> Callable[..., None]:
        def stop(*args: object) -> None:
            raise Understood(parse(*args))

        return stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Understood) as understood:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, stopping(getattr(argparse.ArgumentParser, name)))
        patch.setattr(sys, "argv", words[1:])
        patch.setattr(os, "environ", os.environ.copy())  # what it sets for itself
        runpy.run_path(words[1], run_name="__main__")
    config = getattr(understood.value.args[0], "config", None)
    if config is not None:
        load_config(config, getattr(understood.value.args[0], "overrides", None))


def takes_that_many(words: list[str]) -> None:
    """An example: it takes its words by position."""
    (names,) = re.findall(r"^\s+(.*) = sys\.argv\[1:\]$|main\(sys\.argv\[1\]\)", Path(words[1]).read_text(), re.M)
    assert len(words) - 2 == len(names.split(","))


def takes_its_flags(words: list[str]) -> None:
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(argv=words)
    assert Path(board.flags.logdir).is_dir()


def activates(words: list[str]) -> None:
    script = f". {words[1]} && command -v python"
    found = subprocess.run(["sh", "-c", script], text=True, check=True, capture_output=True).stdout.strip()
    assert Path(found).parent.resolve() == Path(sys.prefix, "bin").resolve()


def installs_an_extra(words: list[str]) -> None:
    (extra,) = re.findall(r"^forge-async\[(\w+)\]$", words[2])
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def names_the_port(words: list[str]) -> None:
    assert words == ["ssh", "-L", f"{PORT}:127.0.0.1:{PORT}", "machine"]


# ---- which command is which ----


@dataclass(frozen=True)
class Row:
    pattern: str
    """Of the whole command, placeholders filled in."""
    do: Do
    test: str = ""
    """What does the rest: file and name of a test, and words that are in it."""
    words: str = ""


RUN = "tests/integration/test_run.py::test_a_run_keeps_its_invariants_is_replayed_and_resumes"
SHELL = "tests/integration/test_notebooks.py::test_the_runs_folder_is_read_from_a_shell"
EXAMPLES = "tests/integration/test_examples.py::"
TARGETS = "tests/test_setup.py::test_make_targets"

TABLE = (
    Row(r"forge-async (\w+ )?--help", shows_its_help),
    Row(r"forge-async \w+", is_a_command),
    Row(r"forge-async run \S+\.yaml.* resume=.*", prints_its_config, RUN, 'app.run("resume=runs/tiny", "steps=6"'),
    Row(r"forge-async run \S+\.yaml.*", prints_its_config, RUN, "app.run("),
    Row(
        r"forge-async doctor \S+\.yaml.*",
        prints_its_config,
        "tests/doctor/test_doctor.py::test_faults_in_running_meshes_are_found",
        "report.examine(config)",
    ),
    Row(
        r"forge-async sft \S+\.yaml.*",
        prints_its_config,
        EXAMPLES + "test_the_warm_up_of_forge_async_sft_trains_and_exports",
        '["sft", ',
    ),
    Row(r"forge-async replay \S+( --steps \d+)?", replays_what_is_recorded, RUN, "app.replay()"),
    Row(
        r"forge-async generate .*",
        generate_is_understood,
        "tests/test_cli.py::test_generate_asks_the_newest_weights_of_a_run",
        '"generate", run, "101"',
    ),
    Row(r"forge-async (episodes|compare|trace) .*", succeeds),
    Row(r"forge-async export .*", exports_what_was_saved, SHELL, '["export", str(run), "--to"'),
    Row(r"forge-async dashboard .*", serves_the_page),
    Row(r"forge-async --install-completion", installs_completion),
    Row(r"make help", makes),
    Row(r"make site", makes, "tests/test_docs_site.py::test_the_site_builds_without_a_warning", "built"),
    Row(
        r"make reference",
        makes,
        "tests/test_docs.py::test_the_lists_of_settings_and_commands_are_up_to_date",
        "reference.PAGE",
    ),
    Row(r"make (grpo|smollm2|test|check|setup).*", makes, TARGETS, "planned("),
    Row(r"make fuzz", makes, "tests/buffer/test_fuzz.py::test_every_schedule_keeps_every_promise", ""),
    Row(r"python apps/grpo_main.py.* resume=.*", app_prints_its_config, RUN, 'app.run("resume=runs/tiny", "steps=6"'),
    Row(r"python apps/grpo_main.py.*", app_prints_its_config, RUN, "app.run("),
    Row(
        r"python apps/examples/generate.py .*",
        takes_that_many,
        EXAMPLES + "test_a_policy_service_answers_on_its_own",
        'start("generate"',
    ),
    Row(
        r"python apps/examples/train_on_episodes.py .*",
        takes_that_many,
        EXAMPLES + "test_a_trainer_learns_from_a_file_of_scored_episodes",
        'start("train_on_episodes"',
    ),
    Row(
        r"python apps/examples/publish_by_hand.py .*",
        takes_that_many,
        EXAMPLES + "test_versions_published_by_hand_are_seen_by_one_long_request",
        'start("publish_by_hand"',
    ),
    Row(
        r"python apps/examples/buffer_by_hand.py",
        runs,
        EXAMPLES + "test_the_buffer_is_usable_by_hand",
        'start("buffer_by_hand"',
    ),
    Row(r"python (benchmarks|tools)/\w+\.py.*", is_understood),
    Row(r"python -m asyncio", answers_await),
    Row(r"python -m forge_async.model_zoo .*", makes_the_model),
    Row(r"python make_data.py", runs),
    Row(r"tensorboard --logdir \S+", takes_its_flags),
    Row(r"source .venv/bin/activate", activates),
    Row(
        r"pip install \S+",
        installs_an_extra,
        "tests/test_setup.py::test_the_closure_is_all_pinned_and_agrees_with_the_project",
    ),
    Row(r"ssh .*", names_the_port),
)


def filled(command: Command) -> list[str]:
    """The words, with something for each placeholder."""
    if not command.inline:
        return command.words
    words = shlex.split(re.sub(r"(?<=\s)\[([^\]]*)\]", r"\1", command.text).replace("...", ""))
    own = {"CONFIG": "configs/sft_tiny.yaml"} if words[1] == "sft" else {}
    return [(PLACEHOLDERS | own).get(word, word) for word in words]


def once() -> Iterator[Command]:
    seen: set[str] = set()
    for command in commands():
        text = " ".join(filled(command))
        if text not in seen:
            seen.add(text)
            yield command


def row_of(words: list[str]) -> Row:
    text = " ".join(words)
    found = next((row for row in TABLE if re.fullmatch(row.pattern, text)), None)
    assert found is not None, f"no row of TABLE carries out: {text}"
    return found


@pytest.mark.parametrize("command", list(once()), ids=lambda command: f"{command.page}: {command.text}")
def test_a_command_is_carried_out(command: Command) -> None:
    words = filled(command)
    row_of(words).do(words)


@pytest.mark.parametrize("row", [row for row in TABLE if row.test], ids=lambda row: row.pattern)
def test_the_test_that_does_the_rest_exists(row: Row) -> None:
    path, _, name = row.test.partition("::")
    assert name in functions_of(path), row.test
    assert row.words in functions_of(path)[name], f"{row.test} does not do it"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("forge-async episodes runs/first --lst 5", "No such option"),
        ("forge-async run configs/grpo_tiny.yaml buffer.max_stalenes=0", "Did you mean buffer.max_staleness"),
        ("forge-async doctor configs/grpo_tiny.yml", "configs/grpo_tiny.yml"),
        ("make trian", ""),
        ("python benchmarks/async_vs_sync.py --confg x", ""),
        ("pip install forge-async[cpuu]", ""),
        ("rm -rf runs", "no row of TABLE"),
    ],
)
def test_a_command_that_is_wrong_fails(text: str, words: str) -> None:
    """The test can fail: an option, a setting, a file, a target, a program that do not exist."""
    with pytest.raises((AssertionError, subprocess.CalledProcessError, SystemExit)) as failure:
        command = Command("page", text, inline=False).words
        row_of(command).do(command)
    assert words in str(failure.value)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
